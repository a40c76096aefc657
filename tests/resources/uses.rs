//! Uses on further streams, in every resource that takes notes of them.

use std::sync::mpsc;

use cuda_sim::Schedule;
use cuda_sys::types::CUstream_flags_enum;
use vpmm::resource::{
    Checks, CoalescingConfig, CoalescingPool, FixedSize, FixedSizeConfig, Limiting,
};
use vpmm::{Error, MemoryResource, Stream, StreamHandle};

use crate::subjects::{each, malloc};
use crate::support::{Rig, Stall, call, streams};
use crate::watched::{Held, Watched};

const BYTES: usize = 3 << 20;

#[test]
fn what_keeps_books_takes_notes() {
    each(|_, resource| {
        let books = ["pool", "fixed-size", "arena", "binning", "caching"];
        let (name, facts) = (resource.describe(), resource.facts());
        assert!(facts.records_streams || !books.contains(&name.name()), "{name}");
    });
}

fn each_that_records(test: impl Fn(&Rig, &Watched<'_>)) {
    each(|rig, resource| {
        if resource.facts().records_streams {
            let watched = Watched::new(rig, resource);
            test(rig, &watched);
            watched.assert_intact();
        }
    });
}

/// Enqueues a check of an allocation on a stream that is stuck, and notes that.
fn look<'a>(
    watched: &'a Watched<'_>,
    held: &Held,
    own: StreamHandle,
    side: StreamHandle,
) -> Stall<'a> {
    watched.rig.order(own, side);
    let stall = watched.rig.stall(side);
    watched.check(held, side);
    watched.resource.record_stream(held.ptr, side).expect("noted");
    stall
}

/// Fills some memory on a stream, which must not be what is still looked at.
fn churn(watched: &Watched<'_>, stream: StreamHandle) {
    let some: Vec<_> = (0..6).map(|_| watched.allocate(BYTES, stream)).collect();
    some.into_iter().for_each(|held| watched.free(held, stream));
}

#[test]
fn memory_is_nobodys_before_all_uses_are_over() {
    each_that_records(|rig, watched| {
        let (own, side, other) = (rig.stream(), rig.stream(), rig.stream());
        for _ in 0..4 {
            let held = watched.allocate(BYTES, &own);
            let ptr = held.ptr;
            let stall = look(watched, &held, own.handle(), side.handle());
            watched.free(held, &own);
            let again = watched.resource.deallocate(ptr, BYTES, 256, own.handle());
            assert!(again.is_err(), "freed twice");
            churn(watched, own.handle());
            churn(watched, other.handle());
            // Neither stream was made to wait for the one that is stuck.
            own.synchronize().expect("it is not stuck");
            other.synchronize().expect("it is not stuck");
            drop(stall);
            side.synchronize().expect("it goes on");
            churn(watched, own.handle());
        }
    });
}

/// What is kept comes back: rounds and rounds take no more memory.
#[test]
fn kept_memory_comes_back() {
    each_that_records(|rig, watched| {
        let (own, side) = (rig.stream(), rig.stream());
        let mut held_bytes = Vec::new();
        for round in 0..64 {
            let held = watched.allocate(BYTES, &own);
            drop(look(watched, &held, own.handle(), side.handle()));
            watched.free(held, &own);
            rig.device.synchronize().expect("all is done");
            if round >= 32 {
                held_bytes.push(watched.resource.held_bytes());
            }
        }
        assert!(held_bytes.iter().all(|bytes| *bytes == held_bytes[0]), "{held_bytes:?}");
    });
}

#[test]
fn streams_end_with_uses_noted_and_pending() {
    each_that_records(|rig, watched| {
        let own = rig.stream();
        for before_the_free in [true, false] {
            let side = rig.stream();
            let held = watched.allocate(BYTES, &own);
            let stall = look(watched, &held, own.handle(), side.handle());
            if before_the_free {
                drop(side);
                // Others come to its place.
                let next = rig.stream();
                churn(watched, next.handle());
                watched.free(held, &own);
            } else {
                watched.free(held, &own);
                drop(side);
            }
            churn(watched, own.handle());
            drop(stall);
            churn(watched, own.handle());
            rig.device.synchronize().expect("all is done");
        }
    });
}

/// Of many streams that used it and have ended some are over, and are forgotten; one is not.
#[test]
fn one_of_many_streams_that_have_ended_still_uses_it() {
    each_that_records(|rig, watched| {
        let (own, other) = (rig.stream(), rig.stream());
        for stuck in [0, 5, 19] {
            let held = watched.allocate(BYTES, &own);
            let mut stalls = Vec::new();
            for at in 0..20 {
                let side = rig.stream();
                let stall = look(watched, &held, own.handle(), side.handle());
                if at == stuck {
                    stalls.push(stall);
                } else {
                    drop(stall);
                    side.synchronize().expect("it is not stuck");
                }
            }
            watched.free(held, &own);
            churn(watched, own.handle());
            churn(watched, other.handle());
            own.synchronize().expect("it is not stuck");
            other.synchronize().expect("it is not stuck");
            stalls.clear();
            rig.device.synchronize().expect("all is done");
            churn(watched, own.handle());
        }
    });
}

/// To ask about a stream that has ended is to learn of all that it freed: others have that, though they noted
/// something just before.
#[test]
fn what_a_user_freed_before_its_end_is_for_others() {
    each_that_records(|rig, watched| {
        let own = rig.stream();
        let held = watched.allocate(BYTES, &own);
        let mut most = Vec::new();
        for _ in 0..48 {
            let side = rig.stream();
            let beside = [0; 3].map(|_| watched.allocate(BYTES, &side));
            drop(look(watched, &held, own.handle(), side.handle()));
            beside.into_iter().for_each(|beside| watched.free(beside, &side));
            side.synchronize().expect("it is not stuck");
            most.push(watched.resource.held_bytes());
        }
        assert!(most[16..].iter().all(|bytes| *bytes == most[16]), "{most:?}");
        watched.free(held, &own);
    });
}

/// A note stands for all that its stream is given until the free, though the host has waited since.
#[test]
fn a_stream_that_goes_on_using_what_was_noted_long_ago_ends() {
    each_that_records(|rig, watched| {
        let (own, other) = (rig.stream(), rig.stream());
        for waits in [false, true] {
            let side = rig.stream();
            let held = watched.allocate(BYTES, &own);
            rig.order(&own, &side);
            watched.resource.record_stream(held.ptr, side.handle()).expect("noted");
            if waits {
                side.synchronize().expect("it is not stuck");
            } else {
                // More than there is: streams are asked how far they have come.
                churn(watched, other.handle());
            }
            let stall = rig.stall(side.handle());
            watched.check(&held, &side);
            drop(side);
            watched.free(held, &own);
            churn(watched, own.handle());
            churn(watched, other.handle());
            drop(stall);
            rig.device.synchronize().expect("all is done");
        }
    });
}

#[test]
fn uses_on_streams_of_every_kind() {
    each_that_records(|rig, watched| {
        let own = rig.stream();
        let (raw, foreign) = streams::make(rig, 1);
        for side in [foreign, StreamHandle::LEGACY, StreamHandle::PER_THREAD, foreign] {
            let held = watched.allocate(BYTES, &own);
            let stall = look(watched, &held, own.handle(), side);
            watched.free(held, &own);
            churn(watched, own.handle());
            drop(stall);
            churn(watched, own.handle());
        }
        call!(rig.driver, cuStreamSynchronize(foreign.raw()));
        call!(rig.driver, cuStreamDestroy_v2(raw));
        churn(watched, own.handle());
    });
}

/// Only a thread can record on its default stream.
#[test]
fn a_use_on_another_threads_default_stream() {
    each_that_records(|rig, watched| {
        let own = rig.stream();
        let held = watched.allocate(BYTES, &own);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                call!(rig.driver, cuCtxSetCurrent(rig.device.context()));
                drop(look(watched, &held, own.handle(), StreamHandle::PER_THREAD));
                call!(rig.driver, cuStreamSynchronize(StreamHandle::PER_THREAD.raw()));
            });
        });
        watched.free(held, &own);
        churn(watched, own.handle());
        rig.device.synchronize().expect("all is done");
        churn(watched, own.handle());
    });
}

/// An event on the default stream of the thread that frees says nothing of another thread's.
#[test]
fn a_use_on_another_threads_default_stream_is_waited_for() {
    each_that_records(|rig, watched| {
        let own = rig.stream();
        let held = watched.allocate(BYTES, &own);
        let (tell, told) = mpsc::channel();
        let (end, ends) = mpsc::channel::<()>();
        std::thread::scope(|scope| {
            let own = &own;
            // The thread lives until its work is over: a GPU's driver has it wait for that. And it waits itself, or
            // its end may never come beside a pool of the driver's (benches/results/h200-2026-11-21-thread-end).
            scope.spawn(move || {
                call!(rig.driver, cuCtxSetCurrent(rig.device.context()));
                let stall = look(watched, &held, own.handle(), StreamHandle::PER_THREAD);
                tell.send(stall).expect("the other thread listens");
                // Nothing is sent: the other end goes.
                let _ = ends.recv();
                call!(rig.driver, cuStreamSynchronize(StreamHandle::PER_THREAD.raw()));
            });
            let stall = told.recv().expect("it is stuck");
            watched.free(held, own);
            churn(watched, own.handle());
            own.synchronize().expect("it is not stuck");
            churn(watched, own.handle());
            drop(stall);
            rig.device.synchronize().expect("all is done");
            churn(watched, own.handle());
            drop(end);
        });
    });
}

#[test]
fn wrong_notes_are_refused_and_change_nothing() {
    each_that_records(|rig, watched| {
        let (own, side) = (rig.stream(), rig.stream());
        let held = watched.allocate(BYTES, &own);
        let address = held.ptr.address();
        let freed = watched.resource.allocate(BYTES, 256, own.handle()).expect("memory");
        watched.resource.deallocate(freed, BYTES, 256, own.handle()).expect("freed");
        for wrong in [address + 256, freed.address(), 0x1000] {
            let ptr = vpmm::DevicePtr::from_address(wrong);
            let noted = watched.resource.record_stream(ptr, side.handle());
            assert!(noted.is_err(), "{wrong:#x}");
        }
        if watched.resource.facts().checks != Checks::PointersAndSizes {
            return watched.free(held, &own);
        }
        let wrong = watched.resource.deallocate(held.ptr, BYTES - 1, 256, own.handle());
        watched.resource.record_stream(held.ptr, side.handle()).expect("noted");
        let noted = watched.resource.deallocate(held.ptr, BYTES - 1, 256, own.handle());
        assert_eq!(format!("{wrong:?}"), format!("{noted:?}"), "the same mistake");
        let is_named = |result: &vpmm::Result<()>| matches!(result, Err(Error::WrongSize { .. }));
        assert!(is_named(&wrong) && is_named(&noted), "{wrong:?} {noted:?}");
        watched.free(held, &own);
    });
}

/// Pools of two blocks and no more.
fn of_two_blocks(rig: &Rig) -> [Box<dyn MemoryResource>; 2] {
    let mut config = CoalescingConfig::default();
    (config.initial_bytes, config.max_bytes) = (2 * BYTES as u64, Some(2 * BYTES as u64));
    let whole = || CoalescingPool::new(malloc(rig), &rig.device, &config).expect("a pool");
    let mut fixed = FixedSizeConfig::default();
    (fixed.block_bytes, fixed.blocks_at_once) = (BYTES, 2);
    let blocks = FixedSize::new(whole(), &rig.device, &fixed).expect("blocks");
    [Box::new(whole()), Box::new(blocks)]
}

/// Where events tell when all uses are over a request that comes before is refused, and does not wait for the device.
#[test]
fn no_request_waits_for_the_device_where_events_tell() {
    Rig::everywhere(|rig| {
        for resource in of_two_blocks(rig) {
            let watched = Watched::new(rig, &*resource);
            for (is_foreign, is_asked_before, ends) in [
                (true, false, false),
                (true, true, false),
                (false, true, false),
                (false, false, true),
                (false, true, true),
            ] {
                let own = rig.stream();
                let non_blocking = CUstream_flags_enum::CU_STREAM_NON_BLOCKING.0;
                let made = is_foreign.then(|| streams::make(rig, non_blocking));
                let side = match made {
                    // SAFETY: it is destroyed below.
                    Some((_, handle)) => unsafe { Stream::passing(&rig.device, handle) },
                    None => rig.stream(),
                };
                let [first, second] = [(); 2].map(|()| watched.allocate(BYTES, &own));
                let stall = look(&watched, &first, own.handle(), side.handle());
                watched.free(first, &own);
                let refused = || {
                    let before = rig.driver.calls();
                    let refused = resource.allocate(BYTES, 256, own.handle());
                    assert!(refused.is_err_and(|error| error.is_out_of_memory()));
                    let calls = rig.driver.calls().since(&before);
                    assert_eq!(calls.count("cuCtxSynchronize"), 0);
                };
                if is_asked_before {
                    refused();
                }
                resource.record_stream(second.ptr, side.handle()).expect("noted");
                watched.check(&second, side.handle());
                watched.free(second, &own);
                if ends {
                    drop(side);
                }
                refused();
                drop(stall);
                // Nobody is told of this wait.
                call!(rig.driver, cuCtxSynchronize());
                // One request asks about all of a stream's events.
                let most = resource.facts().max_bytes.expect("a most");
                let again = watched.allocate(most, &own);
                watched.free(again, &own);
                if let Some((raw, _)) = made {
                    call!(rig.driver, cuStreamDestroy_v2(raw));
                }
            }
            watched.assert_intact();
        }
    });
}

/// Of a use that no event can be recorded for a wait for the device tells.
#[test]
fn a_full_pool_waits_for_a_use_on_another_threads_default_stream() {
    Rig::everywhere(|rig| {
        for resource in of_two_blocks(rig) {
            let watched = Watched::new(rig, &*resource);
            let own = rig.stream();
            let [held, other] = [(); 2].map(|()| watched.allocate(BYTES, &own));
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    call!(rig.driver, cuCtxSetCurrent(rig.device.context()));
                    drop(look(&watched, &held, own.handle(), StreamHandle::PER_THREAD));
                    call!(rig.driver, cuStreamSynchronize(StreamHandle::PER_THREAD.raw()));
                });
            });
            watched.free(held, &own);
            let again = watched.allocate(BYTES, &own);
            watched.free(again, &own);
            watched.free(other, &own);
            watched.assert_intact();
        }
    });
}

/// Each question is a new one: what a stream frees after it was asked about is asked about again.
#[test]
fn streams_are_asked_again_and_again() {
    // An event that was recorded just now is complete.
    let rig = &Rig::simulated(Schedule::Eager);
    {
        for resource in of_two_blocks(rig) {
            let watched = Watched::new(rig, &*resource);
            let non_blocking = CUstream_flags_enum::CU_STREAM_NON_BLOCKING.0;
            let (own, (raw, foreign)) = (rig.stream(), streams::make(rig, non_blocking));
            for _ in 0..4 {
                for stream in [own.handle(), foreign] {
                    let before = rig.driver.calls();
                    let both = [(); 2].map(|()| watched.allocate(BYTES, stream));
                    both.into_iter().for_each(|held| watched.free(held, stream));
                    // Nobody is told of this wait.
                    call!(rig.driver, cuCtxSynchronize());
                    let calls = rig.driver.calls().since(&before);
                    assert_eq!(calls.count("cuStreamWaitEvent"), 0, "all was complete");
                }
            }
            call!(rig.driver, cuStreamDestroy_v2(raw));
            watched.assert_intact();
        }
    }
}

/// A wait of the host's settles uses without a question.
#[test]
fn a_wait_that_is_told_makes_kept_memory_everybodys() {
    Rig::everywhere(|rig| {
        for resource in of_two_blocks(rig) {
            let watched = Watched::new(rig, &*resource);
            let [own, side, other] = [(); 3].map(|()| rig.stream());
            let warm = watched.allocate(BYTES, &other);
            watched.free(warm, &other);
            let held = [(); 2].map(|()| watched.allocate(BYTES, &own));
            for held in held {
                drop(look(&watched, &held, own.handle(), side.handle()));
                watched.free(held, &own);
            }
            rig.device.synchronize().expect("all is done");
            let before = rig.driver.calls();
            let again = [(); 2].map(|()| resource.allocate(BYTES, 256, other.handle()));
            assert_eq!(rig.driver.calls().since(&before).total(), 0, "everybody's");
            for ptr in again {
                resource
                    .deallocate(ptr.expect("memory"), BYTES, 256, other.handle())
                    .expect("freed");
            }
        }
    });
}

/// What is short is told in the numbers of the blocks, not in those of what is below.
#[test]
fn blocks_that_are_kept_are_free_and_short() {
    Rig::everywhere(|rig| {
        let mut fixed = FixedSizeConfig::default();
        (fixed.block_bytes, fixed.blocks_at_once) = (BYTES, 2);
        let limit = Limiting::new(malloc(rig), 2 * BYTES as u64);
        let blocks = FixedSize::new(limit, &rig.device, &fixed).expect("blocks");
        let watched = Watched::new(rig, &blocks);
        let (own, side) = (rig.stream(), rig.stream());
        let held = [(); 2].map(|()| watched.allocate(BYTES, &own));
        let short = |free: u64| {
            let error = blocks.allocate(BYTES, 256, own.handle()).expect_err("none is left");
            let block = BYTES as u64;
            assert!(
                matches!(
                    error,
                    Error::OutOfMemory {
                        free_bytes,
                        largest_free_bytes,
                        mapped_bytes,
                        live_bytes,
                        limit_bytes: None,
                        ..
                    } if free_bytes == free * block
                        && largest_free_bytes == free.min(1) * block
                        && mapped_bytes == 2 * block
                        && live_bytes == (2 - free) * block
                ),
                "{error:?}"
            );
        };
        short(0);
        let [first, second] = held;
        let stall = look(&watched, &first, own.handle(), side.handle());
        watched.free(first, &own);
        short(1);
        drop(stall);
        watched.free(second, &own);
        watched.assert_intact();
    });
}
