//! Random programs over several streams against a model, with work that completes adversarially.

use cuda_sim::{Schedule, Simulator};
use proptest::prelude::*;
use vpmm::{Error, PendingPolicy};

use crate::rig::{PAGE, config};
use crate::support::{Held, Rig, Stall, call, cases};

#[derive(Clone, Debug)]
enum Action {
    Malloc {
        pages: u64,
        stream: usize,
    },
    Small {
        bytes: u64,
        stream: usize,
    },
    Free {
        which: prop::sample::Index,
        stream: usize,
    },
    /// The host waits for a stream, unless one is stalled.
    Synchronize {
        stream: usize,
    },
    Stall {
        stream: usize,
    },
    Release,
    /// A stream is destroyed with work and frees pending, and another takes its place.
    Replace {
        stream: usize,
    },
    /// Another stream uses an allocation, too.
    Use {
        which: prop::sample::Index,
        stream: usize,
    },
    /// One stream comes after another.
    Follow {
        before: usize,
        after: usize,
    },
    /// The host waits for a stream past the library, unless one is stalled, and says so.
    Passed {
        stream: usize,
    },
    Trim {
        keep_pages: u64,
    },
}

const STREAMS: usize = 3;
const LIMIT: u64 = 24;

fn action() -> impl Strategy<Value = Action> {
    let stream = 0..STREAMS;
    prop_oneof![
        6 => (1..9_u64, stream.clone()).prop_map(|(pages, stream)| Action::Malloc { pages, stream }),
        1 => (1..PAGE, stream.clone()).prop_map(|(bytes, stream)| Action::Small { bytes, stream }),
        6 => (any::<prop::sample::Index>(), stream.clone()).prop_map(|(which, stream)| Action::Free { which, stream }),
        1 => stream.clone().prop_map(|stream| Action::Synchronize { stream }),
        1 => stream.clone().prop_map(|stream| Action::Stall { stream }),
        1 => Just(Action::Release),
        1 => stream.clone().prop_map(|stream| Action::Replace { stream }),
        2 => (any::<prop::sample::Index>(), stream.clone()).prop_map(|(which, stream)| Action::Use { which, stream }),
        2 => (stream.clone(), stream.clone()).prop_map(|(before, after)| Action::Follow { before, after }),
        1 => stream.prop_map(|stream| Action::Passed { stream }),
        1 => (0..LIMIT).prop_map(|keep_pages| Action::Trim { keep_pages }),
    ]
}

fn schedule() -> impl Strategy<Value = Schedule> {
    prop_oneof![
        Just(Schedule::Eager),
        (1..20_u32).prop_map(|patience| Schedule::Late { patience }),
        Just(Schedule::Random),
        Just(Schedule::Manual),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), ..ProptestConfig::default() })]

    /// Allocations never overlap, keep what was written into them, and fail only when what is
    /// live, what other streams may still use, and the request together pass the limit: no memory
    /// is ever lost to fragmentation. A trim returns what the device has more, and every address
    /// names its allocation.
    #[test]
    fn random_programs(
        actions in prop::collection::vec(action(), 1..80),
        schedule in schedule(),
        seed in any::<u64>(),
        wait_first in any::<bool>(),
        opportunistic in any::<bool>(),
        va_pages in 8..64_u64,
    ) {
        let rig = Rig::on(Simulator::builder().schedule(schedule).seed(seed).build().unwrap());
        let mut config = config(PAGE, 2);
        config.va_size_bytes = va_pages * PAGE;
        config.pending_policy = if wait_first { PendingPolicy::WaitFirst } else { PendingPolicy::GrowFirst };
        config.reuse.opportunistic = opportunistic;
        // Small requests take memory of the device's that the model does not know; the limit
        // leaves room for what the driver's pool may hold for them.
        config.limit_bytes = Some(LIMIT * PAGE);
        let watched = rig.pool(&config);
        let mut streams: Vec<_> = (0..STREAMS).map(|_| rig.stream()).collect();
        let mut stalls: Vec<Stall<'_>> = Vec::new();
        // What is live, the stream that wrote it, and whether others have used it.
        let mut live: Vec<(Held, usize, bool)> = Vec::new();
        // Freed while others may have used it, since the host last waited for everything.
        let mut kept_pages = 0;
        let mut any_small = false;
        for action in actions {
            match action {
                Action::Malloc { pages, stream } => {
                    let live_pages: u64 = live.iter().map(|(held, ..)| held.bytes.div_ceil(PAGE)).sum();
                    let mut result = watched.try_malloc(pages * PAGE, &streams[stream]);
                    if result.is_err() && stalls.is_empty() {
                        rig.device.synchronize().unwrap();
                        kept_pages = 0;
                        result = watched.try_malloc(pages * PAGE, &streams[stream]);
                    }
                    match result {
                        Ok(held) => {
                            prop_assert!(held.address().is_multiple_of(PAGE));
                            live.push((held, stream, false));
                        }
                        Err(Error::OutOfMemory { .. }) => {
                            let taken = live_pages + kept_pages;
                            prop_assert!(any_small || taken + pages > LIMIT, "{taken} taken, {pages} wanted: {}", watched.layout());
                        }
                        Err(other) => prop_assert!(false, "{other}"),
                    }
                }
                Action::Small { bytes, stream } => match watched.try_malloc(bytes, &streams[stream]) {
                    Ok(held) => {
                        any_small = true;
                        live.push((held, stream, false));
                    }
                    Err(error) => prop_assert!(error.is_out_of_memory(), "{error}"),
                },
                Action::Free { which, stream } => {
                    if live.is_empty() {
                        continue;
                    }
                    let (held, of, used) = live.swap_remove(which.index(live.len()));
                    kept_pages += if used { held.bytes.div_ceil(PAGE) } else { 0 };
                    if of != stream {
                        // The program's own duty: the freeing stream comes after the writing one.
                        rig.order(&streams[of], &streams[stream]);
                    }
                    watched.free(held, &streams[stream]);
                }
                Action::Synchronize { stream } => {
                    if stalls.is_empty() {
                        streams[stream].synchronize().unwrap();
                    }
                }
                Action::Stall { stream } => {
                    if stalls.len() < 2 {
                        stalls.push(rig.stall(streams[stream].handle()));
                    }
                }
                Action::Release => {
                    stalls.pop();
                }
                Action::Replace { stream } => {
                    // Whatever it still holds goes first, as a program would do it.
                    let (of_stream, others): (Vec<_>, Vec<_>) = live.into_iter().partition(|(_, of, _)| *of == stream);
                    live = others;
                    for (held, _, used) in of_stream {
                        kept_pages += if used { held.bytes.div_ceil(PAGE) } else { 0 };
                        watched.free(held, &streams[stream]);
                    }
                    streams[stream] = rig.stream();
                }
                Action::Use { which, stream } => {
                    if live.is_empty() {
                        continue;
                    }
                    let which = which.index(live.len());
                    let (held, of, used) = &mut live[which];
                    rig.order(&streams[*of], &streams[stream]);
                    held.check(&rig, &streams[stream]);
                    watched.pool.record_stream(held.ptr, &streams[stream]).unwrap();
                    *used = true;
                }
                Action::Follow { before, after } => {
                    let mark = watched.pool.mark(&streams[before]).unwrap();
                    if before != after {
                        rig.order(&streams[before], &streams[after]);
                    }
                    watched.pool.follows(&streams[after], &mark).unwrap();
                }
                Action::Passed { stream } => {
                    if stalls.is_empty() {
                        let mark = watched.pool.mark(&streams[stream]).unwrap();
                        call!(rig.driver, cuStreamSynchronize(streams[stream].handle().raw()));
                        watched.pool.passed(&mark).unwrap();
                    }
                }
                Action::Trim { keep_pages } => {
                    let free = rig.device.free_memory().unwrap();
                    let gone = watched.pool.trim_to(keep_pages * PAGE).unwrap();
                    prop_assert_eq!(rig.device.free_memory().unwrap() - free, gone);
                }
            }
            watched.validate();
            for (held, ..) in &live {
                let found = watched.pool.allocation(held.address() + held.bytes - 1);
                prop_assert_eq!(found.map(|found| found.start), Some(held.ptr));
            }
            prop_assert!(watched.usage() <= LIMIT);
        }
        drop(stalls);
        for (held, stream, _) in live {
            watched.free(held, &streams[stream]);
        }
        watched.assert_intact();
        drop(watched);
        drop(streams);
        let sim = rig.sim.clone().expect("a simulated rig");
        drop(rig);
        let leaks = sim.leaks();
        prop_assert!(leaks.is_empty(), "{leaks:?} {:?}", sim.report().misuse);
    }
}
