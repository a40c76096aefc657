//! Random stacks: resources on each other, several on one too, and what each kind can do besides.

use std::collections::HashMap;
use std::io::Write;
use std::sync::{Arc, Mutex};

use vpmm::caching::CachingConfig;
use vpmm::resource::*;
use vpmm::{
    CachingAllocator, Device, Error, MemoryResource, PagedConfig, PendingPolicy, Pool, PoolConfig,
    StreamHandle,
};

use crate::subjects::{MIB, Shared, malloc};
use crate::support::chance::chance;
use crate::support::{Lcg, Rig};

/// What there is of each kind of memory, in bytes.
pub(crate) const MEMORY: u64 = 48 * MIB;

type Result<T> = std::result::Result<T, Error>;

type Chore = Box<dyn Fn(&mut Lcg, StreamHandle) -> Result<()> + Send + Sync>;

/// A resource in a stack.
pub(crate) struct Level {
    pub(crate) resource: Shared,
    /// What can be allocated of it at a time, in bytes.
    most: u64,
    chore: Chore,
    look_at_end: Box<dyn Fn() + Send + Sync>,
}

impl Level {
    fn plain(resource: impl MemoryResource + 'static, most: u64) -> Result<Self> {
        Self::new(resource, most, |_, _, _| Ok(()), |_| ())
    }

    fn new<R: MemoryResource + 'static>(
        resource: R,
        most: u64,
        chore: impl Fn(&R, &mut Lcg, StreamHandle) -> Result<()> + Send + Sync + 'static,
        look_at_end: impl Fn(&R) + Send + Sync + 'static,
    ) -> Result<Self> {
        let resource = Arc::new(resource);
        let [one, other] = [(); 2].map(|()| Arc::clone(&resource));
        Ok(Self {
            resource,
            most,
            chore: Box::new(move |random, stream| chore(&one, random, stream)),
            look_at_end: Box::new(move || look_at_end(&other)),
        })
    }

    /// What its users may have it do besides.
    pub(crate) fn chore(&self, random: &mut Lcg, stream: StreamHandle) -> Result<()> {
        (self.chore)(random, stream)
    }

    /// When nothing of it is allocated any more.
    pub(crate) fn look_at_end(&self) {
        (self.look_at_end)();
    }
}

/// A stack, the lowest first: its last level is of this kind.
pub(crate) fn random_stack(rig: &Rig, random: &mut Lcg, top: usize) -> Vec<Level> {
    let mut levels = vec![base(rig, random).expect("a resource")];
    let others = random.below(4);
    for number in 0..=others {
        let kind = if number == others { top } else { random.below(KINDS.len() as u64) as usize };
        // On the last, as a rule.
        let below = match random.below(4) {
            0 => random.below(levels.len() as u64) as usize,
            _ => levels.len() - 1,
        };
        match KINDS[kind](&rig.device, random, &levels[below]) {
            Ok(level) => levels.push(level),
            Err(error) => assert!(can_refuse(&error), "{error}"),
        }
    }
    levels
}

/// Whether a request may fail with this where there is little memory.
pub(crate) fn can_refuse(error: &Error) -> bool {
    error.is_out_of_memory()
        || matches!(error, Error::RequestTooLong { .. } | Error::AddressSpaceExhausted { .. })
}

fn base(rig: &Rig, random: &mut Lcg) -> Result<Level> {
    let device = &rig.device;
    match random.below(8) {
        0..2 => Level::plain(malloc(rig), MEMORY),
        2..4 => {
            let mut config = DriverPoolConfig::default();
            config.max_bytes = (random.below(2) == 0).then_some(24 * MIB);
            let pool = DriverPool::new(device, &config)?;
            let trim =
                |pool: &DriverPool, random: &mut Lcg, _| pool.trim_to(random.below(24) * MIB);
            Level::new(pool, MEMORY, trim, |_| ())
        }
        4 => Level::plain(Limiting::new(Managed::new(device)?, MEMORY), MEMORY),
        5 => Level::plain(Limiting::new(PinnedHost::new(device), MEMORY), MEMORY),
        6 => {
            let [one, other] = [(); 2].map(|()| malloc(rig));
            let callback = Callback::new(
                one.facts(),
                move |bytes, align, stream| one.allocate(bytes, align, stream),
                move |ptr, bytes, align, stream| other.deallocate(ptr, bytes, align, stream),
            );
            Level::plain(callback.with_device(device), MEMORY)
        }
        _ => {
            let pool = if random.below(2) == 0 {
                let mut config = PoolConfig::default();
                config.va_size_bytes = Some(16 * MEMORY);
                Pool::new(device, &config)?
            } else {
                let mut config = PagedConfig::default();
                config.va_size_bytes = 16 * MEMORY;
                Pool::paged(device, &config)?
            };
            let limit = |pool: &Pool, random: &mut Lcg, _| match random.below(3) {
                0 => pool.trim_to(random.below(24) * MIB).map(drop),
                1 => pool.limit_to(Some((4 + random.below(24)) * 2 * MIB)),
                _ => pool.limit_to(None),
            };
            let look = |pool: &Pool| pool.validate().expect("the books agree");
            Level::new(pool, MEMORY, limit, look)
        }
    }
}

type Make = fn(&Device, &mut Lcg, &Level) -> Result<Level>;

/// All that stand on another.
pub(crate) const KINDS: [Make; 13] = [
    coalescing,
    fixed_size,
    binning,
    arena,
    caching,
    limiting,
    statistics,
    tracking,
    logging,
    failure_callback,
    aligned,
    thread_safe,
    prefetch,
];

/// The place of the caching allocator among them.
pub(crate) const CACHING: usize = 4;

fn coalescing(device: &Device, random: &mut Lcg, below: &Level) -> Result<Level> {
    let mut config = CoalescingConfig::default();
    config.initial_bytes = random.below(3) * 2 * MIB;
    config.max_bytes = (random.below(2) == 0).then_some(12 * MIB);
    let policies = [PendingPolicy::WaitFirst, PendingPolicy::GrowFirst];
    config.pending_policy = policies[random.below(2) as usize];
    let pool = CoalescingPool::new(Arc::clone(&below.resource), device, &config)?;
    let trim = |pool: &CoalescingPool<Shared>, random: &mut Lcg, stream| {
        pool.trim(stream, random.below(2) == 0).map(drop)
    };
    let most = config.max_bytes.map_or(below.most, |most| most.min(below.most));
    Level::new(pool, most, trim, |pool| assert_eq!(pool.live_bytes(), 0))
}

fn fixed_size(device: &Device, random: &mut Lcg, below: &Level) -> Result<Level> {
    let mut config = FixedSizeConfig::default();
    config.block_bytes = [4096, 100_000, 1 << 20][random.below(3) as usize];
    config.blocks_at_once = [1, 3, 8][random.below(3) as usize];
    config.at_start = random.below(2) == 0;
    Level::plain(FixedSize::new(Arc::clone(&below.resource), device, &config)?, below.most)
}

fn binning(device: &Device, random: &mut Lcg, below: &Level) -> Result<Level> {
    let first = 12 + random.below(6) as u32;
    let powers = first..=first + random.below(5) as u32;
    let bins = Binning::with_powers(Arc::clone(&below.resource), device, powers)?;
    let add = |bins: &Binning<Shared>, random: &mut Lcg, _| match bins.bins().len() {
        0..12 => bins.add_own_bin((1 + random.below(40)) as usize * 30_000),
        _ => Ok(()),
    };
    Level::new(bins, below.most, add, |_| ())
}

fn arena(device: &Device, random: &mut Lcg, below: &Level) -> Result<Level> {
    let mut config = ArenaConfig::default();
    let bytes = (4 + random.below(16)) * MIB;
    config.arena_bytes = Some(bytes);
    let dump = |arena: &Arena<Shared>, _: &mut Lcg, _| {
        let _ = arena.dump().to_string();
        Ok(())
    };
    let look = move |arena: &Arena<Shared>| {
        let dump = arena.dump();
        assert_eq!(dump.arena_bytes(), bytes);
        assert_eq!(dump.superblock_bytes() + dump.free_bytes(), bytes, "{dump}");
    };
    Level::new(Arena::new(Arc::clone(&below.resource), device, &config)?, bytes, dump, look)
}

fn caching(device: &Device, random: &mut Lcg, below: &Level) -> Result<Level> {
    let mut config = CachingConfig::default();
    config.large_segment_bytes = 10 * MIB;
    config.garbage_collection_threshold = (random.below(2) == 0).then_some(0.3);
    let allocator = CachingAllocator::over(Arc::clone(&below.resource), device, &config)?;
    let limit = |allocator: &CachingAllocator, random: &mut Lcg, _| match random.below(3) {
        0 => allocator.set_memory_fraction(random.below(100) as f64 / 100.0),
        1 => allocator.set_memory_fraction(1.0),
        _ => allocator.empty_cache(),
    };
    let look = |allocator: &CachingAllocator| {
        allocator.validate().expect("the books agree");
        assert_eq!(allocator.memory_allocated(), 0);
    };
    Level::new(allocator, below.most, limit, look)
}

fn limiting(_: &Device, random: &mut Lcg, below: &Level) -> Result<Level> {
    let most = (2 + random.below(24)) * MIB;
    let look = |limiting: &Limiting<Shared>| assert_eq!(limiting.allocated_bytes(), 0);
    let chore = move |limiting: &Limiting<Shared>, _: &mut Lcg, _| {
        assert!(limiting.allocated_bytes() <= most);
        Ok(())
    };
    let limiting = Limiting::new(Arc::clone(&below.resource), most);
    Level::new(limiting, most.min(below.most), chore, look)
}

fn statistics(_: &Device, _: &mut Lcg, below: &Level) -> Result<Level> {
    let nest = |statistics: &Statistics<Shared>, random: &mut Lcg, _| {
        match random.below(2) {
            0 => drop(statistics.push()),
            _ => drop(statistics.pop()),
        }
        Ok(())
    };
    let most = below.most;
    let look = move |statistics: &Statistics<Shared>| {
        while statistics.pop().is_some() {}
        let Counters { bytes, allocations } = statistics.counters();
        assert_eq!((bytes.current, allocations.current), (0, 0));
        assert!(bytes.peak <= most as i64, "a peak of {} in {most} bytes", bytes.peak);
    };
    Level::new(Statistics::new(Arc::clone(&below.resource)), most, nest, look)
}

fn tracking(_: &Device, _: &mut Lcg, below: &Level) -> Result<Level> {
    let mut config = TrackingConfig::default();
    let found = Arc::new(Mutex::new(Vec::new()));
    let finds = Arc::clone(&found);
    config.report = Report::Callback(Arc::new(move |finding| {
        finds.lock().expect("no panic").push(finding.to_string());
    }));
    let most = below.most;
    let count = move |tracking: &Tracking<Shared>, _: &mut Lcg, _| {
        assert!(tracking.outstanding_bytes() <= most);
        Ok(())
    };
    let look = move |tracking: &Tracking<Shared>| {
        assert!(tracking.outstanding().is_empty(), "{}", tracking.outstanding());
        assert_eq!(*found.lock().expect("no panic"), [""; 0]);
    };
    Level::new(Tracking::new(Arc::clone(&below.resource), config), most, count, look)
}

/// What a log writes, for who has a copy.
#[derive(Clone, Default)]
struct Text(Arc<Mutex<Vec<u8>>>);

impl Write for Text {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().expect("no panic").extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Text {
    /// No address is allocated that is already, or freed that is not.
    fn replay(&self) {
        let text = String::from_utf8(self.0.lock().expect("no panic").clone()).expect("text");
        let mut live = HashMap::new();
        for row in text.lines().skip(1) {
            let columns: Vec<_> = row.split(',').collect();
            let (ptr, bytes) = (columns[3].to_owned(), columns[4].to_owned());
            match columns[2] {
                "allocate" => assert_eq!(live.insert(ptr, bytes), None, "{row}"),
                "free" => assert_eq!(live.remove(&ptr), Some(bytes), "{row}"),
                "allocate failure" => {}
                _ => panic!("{row}"),
            }
        }
        assert!(live.is_empty(), "{live:?}");
    }
}

fn logging(_: &Device, random: &mut Lcg, below: &Level) -> Result<Level> {
    let text = Text::default();
    let format = [LogFormat::Rmm, LogFormat::Full][random.below(2) as usize];
    let logging = Logging::to_writer(Arc::clone(&below.resource), format, text.clone());
    Level::new(logging, below.most, |_, _, _| Ok(()), move |_| text.replay())
}

fn failure_callback(_: &Device, _: &mut Lcg, below: &Level) -> Result<Level> {
    let callback = FailureCallback::new(Arc::clone(&below.resource), |_, _| chance(2));
    Level::plain(callback, below.most)
}

fn aligned(_: &Device, random: &mut Lcg, below: &Level) -> Result<Level> {
    let alignment = 256 << random.below(6);
    let from = random.below(2) as usize * 5000;
    let aligned = Aligned::new(Arc::clone(&below.resource), alignment)?.from_bytes(from);
    Level::plain(aligned, below.most)
}

fn thread_safe(_: &Device, _: &mut Lcg, below: &Level) -> Result<Level> {
    Level::plain(ThreadSafe::new(Arc::clone(&below.resource)), below.most)
}

fn prefetch(device: &Device, _: &mut Lcg, below: &Level) -> Result<Level> {
    Level::plain(Prefetch::new(Arc::clone(&below.resource), device), below.most)
}
