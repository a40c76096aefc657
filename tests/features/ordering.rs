//! Marks: what a stream may have of another's, and what the host's waits tell.

use cuda_sim::{Schedule, Simulator};
use vpmm::{Error, PendingPolicy, Reuse, StreamHandle};

use crate::rig::{BLOCK, Profile, Settings};
use crate::support::{Rig, Watched, call};

/// The calls by which a pool gets memory from elsewhere than its books: none may be made.
const QUESTIONS: [&str; 5] =
    ["cuEventQuery", "cuEventSynchronize", "cuStreamWaitEvent", "cuMemCreate", "cuMemMap"];

/// Runs a request and sees to it that the driver was asked nothing for it.
fn without_questions<T>(watched: &Watched<'_>, request: impl FnOnce() -> T) -> T {
    let before = watched.rig.driver.calls();
    let answer = request();
    let calls = watched.rig.driver.calls().since(&before);
    for call in QUESTIONS {
        assert_eq!(calls.count(call), 0, "{calls:?}");
    }
    answer
}

#[test]
fn a_stream_that_follows_has_the_memory_at_once() {
    Rig::each(|rig, profile| {
        let watched = rig.pool(profile);
        let (a, b) = (rig.stream(), rig.stream());
        let held = watched.malloc(BLOCK, &a);
        let stall = rig.stall(a.handle());
        watched.free(held, &a); // with a check of the contents that A has still to come to
        let mark = watched.pool.mark(&a).unwrap();
        rig.order(&a, &b);
        watched.pool.follows(&b, &mark).unwrap();
        let again = without_questions(&watched, || watched.malloc(BLOCK, &b));
        assert_eq!(again.address(), held.address());
        drop(stall);
        watched.free(again, &b);
        watched.assert_intact();
    });
}

#[test]
fn the_marked_stream_may_have_it_too() {
    Rig::each(|rig, profile| {
        let watched = rig.pool(profile);
        let (a, b) = (rig.stream(), rig.stream());
        let held = watched.malloc(BLOCK, &a);
        let stall = rig.stall(a.handle());
        watched.free(held, &a);
        let mark = watched.pool.mark(&a).unwrap();
        rig.order(&a, &b);
        watched.pool.follows(&b, &mark).unwrap();
        let of_a = without_questions(&watched, || watched.malloc(BLOCK, &a));
        assert_eq!(of_a.address(), held.address());
        let of_b = watched.malloc(BLOCK, &b);
        assert_ne!(of_b.address(), held.address(), "A came first");
        // What A frees from now on is past the mark.
        watched.free(of_a, &a);
        let other = watched.malloc(BLOCK, &b);
        assert_ne!(other.address(), held.address(), "B does not follow this free");
        drop(stall);
        watched.free(of_b, &b);
        watched.free(other, &b);
        watched.assert_intact();
    });
}

#[test]
fn pieces_that_were_freed_apart_serve_their_sum() {
    Rig::each(|rig, profile| {
        let watched = rig.pool(profile);
        let (a, b) = (rig.stream(), rig.stream());
        let whole = watched.malloc(4 * BLOCK, &a);
        watched.free(whole, &a);
        let pieces = [(); 4].map(|()| watched.malloc(BLOCK, &a));
        let stall = rig.stall(a.handle());
        for index in [2, 0, 3, 1] {
            watched.free(pieces[index], &a);
        }
        let mark = watched.pool.mark(&a).unwrap();
        rig.order(&a, &b);
        watched.pool.follows(&b, &mark).unwrap();
        let again = without_questions(&watched, || watched.malloc(4 * BLOCK, &b));
        assert_eq!(again.address(), whole.address());
        drop(stall);
        watched.free(again, &b);
        watched.assert_intact();
    });
}

#[test]
fn a_stream_follows_many() {
    Rig::each(|rig, profile| {
        let watched = rig.pool(profile);
        let streams = [(); 5].map(|()| rig.stream());
        let last = rig.stream();
        let held: Vec<_> = streams.iter().map(|stream| watched.malloc(BLOCK, stream)).collect();
        let stalls: Vec<_> = streams.iter().map(|stream| rig.stall(stream.handle())).collect();
        for (held, stream) in held.iter().zip(&streams) {
            watched.free(*held, stream);
            let mark = watched.pool.mark(stream).unwrap();
            rig.order(stream, &last);
            watched.pool.follows(&last, &mark).unwrap();
        }
        let mut again = without_questions(&watched, || {
            [(); 5].map(|()| watched.malloc(BLOCK, &last)).map(|held| (held.address(), held))
        });
        again.sort_unstable_by_key(|(address, _)| *address);
        let mut addresses: Vec<_> = held.iter().map(|held| held.address()).collect();
        addresses.sort_unstable();
        assert_eq!(again.map(|(address, _)| address).as_slice(), addresses);
        drop(stalls);
        again.into_iter().for_each(|(_, held)| watched.free(held, &last));
        watched.assert_intact();
    });
}

#[test]
fn without_the_switch_nothing_follows() {
    Rig::each(|rig, profile| {
        let mut settings = Settings::default();
        settings.reuse.follow_event_dependencies = false;
        let watched = rig.pool_with(profile, &settings);
        let (a, b) = (rig.stream(), rig.stream());
        let held = watched.malloc(BLOCK, &a);
        let stall = rig.stall(a.handle());
        watched.free(held, &a);
        let mark = watched.pool.mark(&a).unwrap();
        rig.order(&a, &b);
        watched.pool.follows(&b, &mark).unwrap();
        let other = watched.malloc(BLOCK, &b);
        assert_ne!(other.address(), held.address());
        drop(stall);
        watched.free(other, &b);
        watched.assert_intact();
    });
}

#[test]
fn a_follower_that_was_not_made_to_wait_is_a_race() {
    // That the tests here would notice.
    for profile in Profile::TESTED {
        let rig = Rig::on(Simulator::builder().schedule(Schedule::Manual).build().unwrap());
        let sim = rig.sim.clone().expect("a simulated rig");
        let watched = rig.pool(*profile);
        let (a, b) = (rig.stream(), rig.stream());
        let held = watched.malloc(BLOCK, &a);
        watched.free(held, &a);
        let mark = watched.pool.mark(&a).unwrap();
        watched.pool.follows(&b, &mark).unwrap(); // a lie
        let again = watched.malloc(BLOCK, &b);
        assert_eq!(again.address(), held.address());
        rig.device.synchronize().unwrap();
        assert!(!sim.report().races.is_empty());
    }
}

/// A stream was marked before it came after another one: who follows that mark does not come after the other.
#[test]
fn what_a_stream_follows_after_its_mark_is_not_carried_on() {
    Rig::each(|rig, profile| {
        let watched = rig.pool(profile);
        let [a, b, c] = [(); 3].map(|()| rig.stream());
        let held = watched.malloc(BLOCK, &a);
        let stall = rig.stall(a.handle());
        watched.free(held, &a);
        let early = watched.pool.mark(&b).unwrap();
        let mark = watched.pool.mark(&a).unwrap();
        rig.order(&a, &b);
        watched.pool.follows(&b, &mark).unwrap();
        rig.order(&b, &c);
        watched.pool.follows(&c, &early).unwrap();
        let of_c = watched.malloc(BLOCK, &c);
        assert_ne!(of_c.address(), held.address(), "{}", watched.layout());
        let of_b = watched.malloc(BLOCK, &b);
        assert_eq!(of_b.address(), held.address(), "{}", watched.layout());
        drop(stall);
        watched.free(of_b, &b);
        watched.free(of_c, &c);
        watched.assert_intact();
    });
}

#[test]
fn a_place_that_goes_to_another_stream_follows_nobody() {
    Rig::each(|rig, profile| {
        let watched = rig.pool(profile);
        let a = rig.stream();
        let held = watched.malloc(BLOCK, &a);
        let stall = rig.stall(a.handle());
        watched.free(held, &a);
        let mark = watched.pool.mark(&a).unwrap();
        // So many that the books of those that are gone are used again.
        for _ in 0..200 {
            let short = rig.stream();
            rig.order(&a, &short);
            watched.pool.follows(&short, &mark).unwrap();
        }
        for _ in 0..3 {
            let other = rig.stream();
            let of_other = watched.malloc(BLOCK, &other);
            assert_ne!(of_other.address(), held.address(), "nobody said that it follows");
            watched.free(of_other, &other);
        }
        drop(stall);
        watched.assert_intact();
    });
}

#[test]
fn a_mark_of_another_pool_is_refused() {
    Rig::each(|rig, profile| {
        for other in Profile::TESTED {
            let (watched, foreign) = (rig.pool(profile), rig.pool(*other));
            let stream = rig.stream();
            let mark = foreign.pool.mark(&stream).unwrap();
            // The place that the mark names is some stream's here, too.
            watched.pool.mark(&stream).unwrap();
            for refused in [watched.pool.follows(&stream, &mark), watched.pool.passed(&mark)] {
                assert!(matches!(refused, Err(Error::ForeignMark)), "{refused:?}");
            }
            // Not even when its pool is gone, and this one stands where that stood.
            drop(foreign);
            let next = rig.pool(*other);
            next.pool.mark(&stream).unwrap();
            assert!(matches!(next.pool.passed(&mark), Err(Error::ForeignMark)));
        }
    });
}

#[test]
fn a_stream_of_another_device_is_refused() {
    for profile in Profile::TESTED {
        let rig = Rig::on(Simulator::builder().devices(2).build().unwrap());
        let watched = rig.pool(*profile);
        let (right, wrong) = (rig.stream(), rig.beside(1).stream());
        let mark = watched.pool.mark(&right).unwrap();
        let held = watched.malloc(BLOCK, &right);
        for refused in [
            watched.pool.mark(&wrong).map(drop),
            watched.pool.follows(&wrong, &mark),
            watched.pool.record_stream(held.ptr, &wrong),
        ] {
            let named =
                matches!(refused, Err(Error::WrongDevice { stream_device: 1, pool_device: 0 }));
            assert!(named, "{refused:?}");
        }
        watched.free(held, &right);
        watched.assert_intact();
    }
}

#[test]
fn a_known_stream_is_marked_and_followed_without_a_driver_call() {
    Rig::each(|rig, profile| {
        let watched = rig.pool(profile);
        let (a, b) = (rig.stream(), rig.stream());
        let held = watched.malloc(BLOCK, &a);
        let of_b = watched.malloc(BLOCK, &b);
        let before = rig.driver.calls();
        let mark = watched.pool.mark(&a).unwrap();
        watched.pool.follows(&b, &mark).unwrap();
        watched.pool.record_stream(held.ptr, &b).unwrap();
        watched.pool.passed(&watched.pool.mark(&b).unwrap()).unwrap();
        assert_eq!(rig.driver.calls().since(&before).total(), 0);
        watched.free(held, &a);
        watched.free(of_b, &b);
        watched.assert_intact();
    });
}

/// Frees a block on one stream, lets `wait` wait for that, and has another stream ask for as much.
fn after_a_wait(
    rig: &Rig,
    profile: Profile,
    reuse: Reuse,
    wait: impl FnOnce(&Watched<'_>, &vpmm::Stream),
) {
    let watched = rig.pool_with(profile, &Settings { reuse, ..Settings::default() });
    let (a, b) = (rig.stream(), rig.stream());
    let held = watched.malloc(BLOCK, &a);
    watched.free(held, &a);
    wait(&watched, &a);
    let again = without_questions(&watched, || watched.malloc(BLOCK, &b));
    assert_eq!(again.address(), held.address());
    watched.free(again, &b);
    watched.assert_intact();
}

#[test]
fn the_hosts_waits_make_memory_everybodys() {
    let mut nothing = Reuse::default();
    nothing.opportunistic = false;
    nothing.internal_dependencies = false;
    nothing.follow_event_dependencies = false;
    Rig::each(|rig, profile| {
        for reuse in [Reuse::default(), nothing] {
            after_a_wait(rig, profile, reuse, |_, stream| stream.synchronize().unwrap());
            after_a_wait(rig, profile, reuse, |_, stream| stream.device().synchronize().unwrap());
            after_a_wait(rig, profile, reuse, |watched, stream| {
                let mark = watched.pool.mark(stream).unwrap();
                call!(watched.rig.driver, cuStreamSynchronize(stream.handle().raw()));
                watched.pool.passed(&mark).unwrap();
            });
        }
    });
}

/// So it is with every stream that there is a value of, the library's own or not.
#[test]
fn the_hosts_waits_for_streams_of_others_make_memory_everybodys() {
    let mut nothing = Reuse::default();
    nothing.opportunistic = false;
    Rig::each(|rig, profile| {
        let foreign = rig.stream();
        // SAFETY: the stream lives to the end of the test.
        let passing = unsafe {
            let handle = StreamHandle::from_raw(foreign.handle().raw());
            vpmm::Stream::passing(&rig.device, handle)
        };
        let of_others =
            [vpmm::Stream::legacy(&rig.device), vpmm::Stream::per_thread(&rig.device), passing];
        for stream in &of_others {
            for reuse in [Reuse::default(), nothing] {
                println!("{profile:?}, {stream:?}, {reuse:?}");
                let watched = rig.pool_with(profile, &Settings { reuse, ..Settings::default() });
                let held = watched.malloc(BLOCK, stream);
                watched.free(held, stream);
                stream.synchronize().unwrap();
                let other = rig.stream();
                let again = without_questions(&watched, || watched.malloc(BLOCK, &other));
                assert_eq!(again.address(), held.address());
                watched.free(again, &other);
                watched.assert_intact();
            }
        }
    });
}

#[test]
fn a_wait_covers_what_was_freed_before_it_and_on_its_stream_alone() {
    Rig::each(|rig, profile| {
        let watched = rig.pool(profile);
        let (a, b, c) = (rig.stream(), rig.stream(), rig.stream());
        let (of_a, late, of_b) =
            (watched.malloc(BLOCK, &a), watched.malloc(2 * BLOCK, &a), watched.malloc(BLOCK, &b));
        let stall = rig.stall(b.handle());
        watched.free(of_b, &b);
        watched.free(of_a, &a);
        let mark = watched.pool.mark(&a).unwrap();
        a.synchronize().unwrap();
        let stall_of_a = rig.stall(a.handle());
        watched.free(late, &a);
        watched.pool.passed(&mark).unwrap();
        let first = watched.malloc(BLOCK, &c);
        assert_eq!(first.address(), of_a.address());
        let second = watched.malloc(2 * BLOCK, &c);
        let taken = [of_b.address(), late.address()];
        assert!(!taken.contains(&second.address()), "{}", watched.layout());
        drop((stall, stall_of_a));
        watched.free(first, &c);
        watched.free(second, &c);
        watched.assert_intact();
    });
}

#[test]
fn without_the_switch_a_question_gives_no_memory_away() {
    Rig::each(|rig, profile| {
        for opportunistic in [true, false] {
            let mut settings = Settings::default();
            settings.reuse.opportunistic = opportunistic;
            let watched = rig.pool_with(profile, &settings);
            let (a, b) = (rig.stream(), rig.stream());
            let held = watched.malloc(BLOCK, &a);
            watched.free(held, &a);
            // Past the library, so that nobody tells the pool.
            call!(rig.driver, cuStreamSynchronize(a.handle().raw()));
            let mark = watched.pool.mark(&a).unwrap();
            let of_b = watched.malloc(BLOCK, &b);
            let same = of_b.address() == held.address();
            // The event that the default profile records first may take a moment.
            let tells = !opportunistic || profile == Profile::Paged;
            assert!(!tells || same == opportunistic, "{}", watched.layout());
            watched.free(of_b, &b);
            if !opportunistic {
                // A's own all the while, and everybody's once somebody says so.
                let of_a = watched.malloc(BLOCK, &a);
                assert_eq!(of_a.address(), held.address());
                watched.free(of_a, &a);
                call!(rig.driver, cuCtxSynchronize());
                watched.pool.passed(&mark).unwrap();
                let whole = [(); 2].map(|()| watched.malloc(BLOCK, &b));
                assert!(whole.iter().all(|of_b| of_b.address() != held.address()), "past the mark");
                watched.pool.passed(&watched.pool.mark(&a).unwrap()).unwrap();
                let third = watched.malloc(BLOCK, &b);
                assert_eq!(third.address(), held.address());
                whole.into_iter().chain([third]).for_each(|held| watched.free(held, &b));
            }
            watched.assert_intact();
        }
    });
}

#[test]
fn without_the_switch_no_stream_is_made_to_wait() {
    Rig::each(|rig, profile| {
        for policy in [PendingPolicy::GrowFirst, PendingPolicy::WaitFirst] {
            for internal_dependencies in [true, false] {
                let limit_bytes = Some(BLOCK);
                let mut settings =
                    Settings { limit_bytes, pending_policy: policy, ..Settings::default() };
                settings.reuse.internal_dependencies = internal_dependencies;
                settings.reuse.opportunistic = false;
                let watched = rig.pool_with(profile, &settings);
                let (a, b) = (rig.stream(), rig.stream());
                let held = watched.malloc(BLOCK, &a);
                // A wait of the host's is no wait of a stream's: there is one without the switch.
                let stall = internal_dependencies.then(|| rig.stall(a.handle()));
                watched.free(held, &a);
                let before = rig.driver.calls();
                let other = watched.try_malloc(BLOCK, &b);
                let waits = rig.driver.calls().since(&before).count("cuStreamWaitEvent");
                drop(stall);
                match other {
                    Ok(other) => watched.free(other, &b),
                    Err(error) => {
                        assert!(error.is_out_of_memory() && !internal_dependencies, "{error}");
                    }
                }
                assert_eq!(waits, u64::from(internal_dependencies), "{policy:?}");
                watched.assert_intact();
            }
        }
    });
}
