//! Random programs over several streams against a model, with work that completes adversarially.

use cuda_sim::{Schedule, Simulator};
use proptest::prelude::*;
use vpmm::{Error, PendingPolicy};

use crate::rig::{PAGE, config};
use crate::support::{Held, Rig, Stall, cases};

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
        1 => stream.prop_map(|stream| Action::Replace { stream }),
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
    /// live and the request together pass the limit: no memory is ever lost to fragmentation.
    #[test]
    fn random_programs(
        actions in prop::collection::vec(action(), 1..80),
        schedule in schedule(),
        seed in any::<u64>(),
        wait_first in any::<bool>(),
        va_pages in 8..64_u64,
    ) {
        let rig = Rig::on(Simulator::builder().schedule(schedule).seed(seed).build().unwrap());
        let mut config = config(PAGE, 2);
        config.va_size_bytes = va_pages * PAGE;
        config.pending_policy = if wait_first { PendingPolicy::WaitFirst } else { PendingPolicy::GrowFirst };
        // Small requests take memory of the device's that the model does not know; the limit
        // leaves room for what the driver's pool may hold for them.
        config.limit_bytes = Some(LIMIT * PAGE);
        let watched = rig.pool(&config);
        let mut streams: Vec<_> = (0..STREAMS).map(|_| rig.stream()).collect();
        let mut stalls: Vec<Stall<'_>> = Vec::new();
        let mut live: Vec<(Held, usize)> = Vec::new();
        let mut any_small = false;
        for action in actions {
            match action {
                Action::Malloc { pages, stream } => {
                    let live_pages: u64 = live.iter().map(|(held, _)| held.bytes.div_ceil(PAGE)).sum();
                    match watched.try_malloc(pages * PAGE, &streams[stream]) {
                        Ok(held) => {
                            prop_assert!(held.address().is_multiple_of(PAGE));
                            live.push((held, stream));
                        }
                        Err(Error::OutOfMemory { .. }) => {
                            prop_assert!(any_small || live_pages + pages > LIMIT, "{} live, {pages} wanted: {}", live_pages, watched.layout());
                        }
                        Err(other) => prop_assert!(false, "{other}"),
                    }
                }
                Action::Small { bytes, stream } => match watched.try_malloc(bytes, &streams[stream]) {
                    Ok(held) => {
                        any_small = true;
                        live.push((held, stream));
                    }
                    Err(error) => prop_assert!(error.is_out_of_memory(), "{error}"),
                },
                Action::Free { which, stream } => {
                    if live.is_empty() {
                        continue;
                    }
                    let (held, of) = live.swap_remove(which.index(live.len()));
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
                    let (of_stream, others): (Vec<_>, Vec<_>) = live.into_iter().partition(|(_, of)| *of == stream);
                    live = others;
                    for (held, _) in of_stream {
                        watched.free(held, &streams[stream]);
                    }
                    streams[stream] = rig.stream();
                }
            }
            prop_assert!(watched.usage() <= LIMIT);
        }
        drop(stalls);
        for (held, stream) in live {
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
