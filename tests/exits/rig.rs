//! Pools to end, and processes to end them in.

use std::io::Read;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use vpmm::{Background, Contents, Device, Error, PagedConfig, Pool, PoolConfig};

use crate::support::{Rig, Watched};

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const GRANULE: u64 = 2 * MIB;

/// The most granules that a pool may hold.
pub(crate) const LIMIT: u64 = 48;

/// Granules that a pool has for one request when nothing is in use. The driver's own pool, where the
/// paged profile's small requests come from, has 16 of the others.
pub(crate) const ALL: u64 = 30;

/// Bytes of requests: several handles, one, and part of one, which the paged profile takes from the
/// driver's own pool.
pub(crate) const SIZES: [u64; 3] = [3 * GRANULE, GRANULE, 20_000];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Profile {
    Default,
    /// The default one with its background thread.
    Helped,
    Paged,
}

impl Profile {
    pub(crate) const ALL: [Self; 3] = [Self::Default, Self::Helped, Self::Paged];

    /// A pool of at most [`LIMIT`] granules.
    pub(crate) fn open(self, device: &Device) -> Pool {
        self.try_open(device).expect("a pool")
    }

    pub(crate) fn try_open(self, device: &Device) -> Result<Pool, Error> {
        if self == Self::Paged {
            let mut config = PagedConfig::default();
            config.va_size_bytes = 4 * LIMIT * GRANULE;
            config.limit_bytes = Some(LIMIT * GRANULE);
            return Pool::paged(device, &config);
        }
        let mut config = PoolConfig::default();
        config.moves_per_second = 0;
        config.va_size_bytes = Some(4 * LIMIT * GRANULE);
        config.limit_bytes = Some(LIMIT * GRANULE);
        if self == Self::Helped {
            let mut background = Background::default();
            background.period = Duration::from_micros(200);
            background.ahead_bytes = GRANULE;
            config.background = Some(background);
        }
        Pool::new(device, &config)
    }
}

impl Rig {
    pub(crate) fn pool(&self, profile: Profile) -> Watched<'_> {
        self.watch(profile, true)
    }

    /// A pool that several threads use: the books of the default profile can be checked only while none
    /// does.
    pub(crate) fn shared_pool(&self, profile: Profile) -> Watched<'_> {
        self.watch(profile, profile == Profile::Paged)
    }

    fn watch(&self, profile: Profile, at_every_step: bool) -> Watched<'_> {
        let alignment = if profile == Profile::Paged { 256 } else { 512 };
        Watched::new(self, profile.open(&self.device), alignment, at_every_step)
    }

    /// A test of each profile everywhere: see [`everywhere`](Self::everywhere).
    pub(crate) fn each(test: impl Fn(&Self, Profile)) {
        Self::everywhere(|rig| Profile::ALL.into_iter().for_each(|profile| test(rig, profile)));
    }
}

/// Tags of [`beside`].
pub(crate) const AWAKE: &str = "awake";
pub(crate) const ASLEEP: &str = "asleep";

/// Gives a pool heaps beside its main one: tagged ones, awake and asleep with its contents, and a
/// graph's that is open on the stream.
pub(crate) fn beside(pool: &Pool, stream: &vpmm::Stream) -> (vpmm::GraphPool, [vpmm::Tagged; 2]) {
    let tagged = [AWAKE, ASLEEP].map(|tag| pool.tagged(tag).expect("a heap"));
    for heap in &tagged {
        heap.malloc(MIB as usize, stream).expect("memory of a tag");
    }
    pool.suspend(ASLEEP, stream, &Contents::Keep(vpmm::Buffers::Release)).expect("it sleeps");
    let graph = pool.graph_pool().expect("a graph's pool");
    graph.begin(stream).expect("it begins");
    (graph, tagged)
}

/// The time that a process has.
const LONGEST: Duration = Duration::from_secs(120);

/// Set in a process that a test started: the test's name.
const CHILD: &str = "VPMM_TEST_EXITS";

/// One process at a time: on a GPU they would only wait for each other.
static ALONE: Mutex<()> = Mutex::new(());

/// Runs a test's body in another process, which must come to its end.
pub(crate) fn bounded(test: &str, body: impl FnOnce()) {
    if let Some(status) = elsewhere(test, body) {
        assert!(status.success(), "{test} ended with {status}");
    }
}

/// Runs a test's body in another process, and answers how that ended; in it, nothing.
pub(crate) fn elsewhere(test: &str, body: impl FnOnce()) -> Option<ExitStatus> {
    if std::env::var_os(CHILD).is_some_and(|name| name == test) {
        println!("{ENTERED}");
        body();
        return None;
    }
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(CHILD, test)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut out = child.stdout.take().unwrap();
    let (status, text) = std::thread::scope(|scope| {
        let reader = scope.spawn(move || {
            let mut text = Vec::new();
            out.read_to_end(&mut text).map(|_| String::from_utf8_lossy(&text).into_owned())
        });
        (ends(&mut child), reader.join().unwrap().unwrap())
    });
    print!("{text}");
    let status = status.unwrap_or_else(|| panic!("{test} did not end and was killed"));
    // A name that no test has would end well, too.
    assert!(text.contains(ENTERED), "{test} is not what the test is called");
    Some(status)
}

const ENTERED: &str = "the process of this test is at work";

/// Waits for the end of a process, and kills it where that does not come.
fn ends(child: &mut Child) -> Option<ExitStatus> {
    let start = Instant::now();
    while start.elapsed() < LONGEST {
        if let Some(status) = child.try_wait().unwrap() {
            return Some(status);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    None
}
