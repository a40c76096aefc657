//! The design's scenario in its four cases, and the scenarios of its known implementation's tests,
//! each with contents checked and with work that finishes at once, late, at random, and on a GPU.

use cuda_sim::Schedule;
use vpmm::Stream;

use crate::rig::{PAGE, config};
use crate::support::streams::make;
use crate::support::{Rig, Watched, call};

const GIB: u64 = 1 << 30;

/// +10 +1 −10 +4 +11 with pages of 1 GiB. What was freed has finished where `finished` is set.
fn seed_scenario(rig: &Rig, pages: u64, finished: bool) -> (String, u64, u64) {
    let watched = rig.pool(&config(GIB, pages));
    let stream = rig.stream();
    let ten = watched.pages(10, &stream);
    let one = watched.pages(1, &stream);
    assert_eq!(one.address(), ten.address() + 10 * GIB, "1 stands right after 10");
    let stall = (!finished).then(|| rig.stall(stream.handle()));
    watched.free(ten, &stream);
    if finished {
        stream.synchronize().unwrap();
    }
    let four = watched.pages(4, &stream);
    let eleven = watched.pages(11, &stream);
    let outcome = (watched.layout(), watched.moved(), watched.usage());
    drop(stall);
    for held in [one, four, eleven] {
        watched.free(held, &stream);
    }
    watched.assert_intact();
    outcome
}

const CASES: [(u64, &str, &str, u64, u64); 4] = [
    (23, "[4][-6][1][+11][-1]", "[4][-6][1][+11][-1]", 0, 23),
    (18, "[*8][-2][1][4][+11]", "[~8][-2][1][4][+11]", 8, 18),
    (15, "[*10][1][4][+11]", "[~10][1][4][+11]", 10, 16),
    (12, "[4][*6][1][+11]", "[4][~6][1][+11]", 6, 16),
];

#[test]
fn the_designs_scenario_in_its_four_cases() {
    Rig::everywhere(|rig| {
        for (pages, drawn, _, moved, used) in CASES {
            assert_eq!(
                seed_scenario(rig, pages, true),
                (drawn.to_owned(), moved, used),
                "{pages} pages"
            );
        }
    });
}

#[test]
fn the_designs_scenario_while_the_stream_is_still_busy() {
    Rig::everywhere(|rig| {
        for (pages, _, drawn, moved, used) in CASES {
            assert_eq!(
                seed_scenario(rig, pages, false),
                (drawn.to_owned(), moved, used),
                "{pages} pages"
            );
        }
    });
}

#[test]
fn neighbours_freed_in_any_order_serve_their_sum_in_place() {
    Rig::everywhere(|rig| {
        for order in [[1, 0, 2], [0, 1, 2], [2, 1, 0], [0, 2, 1]] {
            let watched = rig.small_pool(0);
            let stream = rig.stream();
            let held = [(); 3].map(|()| watched.pages(1024, &stream));
            order.into_iter().for_each(|i: usize| watched.free(held[i], &stream));
            let whole = watched.pages(3072, &stream);
            assert_eq!(whole.address(), held[0].address(), "{order:?}");
            assert_eq!((watched.usage(), watched.moved()), (3072, 0));
            watched.free(whole, &stream);
            watched.assert_intact();
        }
    });
}

#[test]
fn addresses_that_run_out_are_reserved_anew() {
    Rig::everywhere(|rig| {
        let mut config = config(PAGE, 0);
        config.va_size_bytes = 2 * PAGE;
        let watched = rig.pool(&config);
        let stream = rig.stream();
        let held: Vec<_> = (0..4).map(|_| watched.pages(1, &stream)).collect();
        assert_eq!(watched.pool.stats().reservation_count, 2);
        // Larger than any reservation so far: one of its own size.
        let large = watched.pages(9, &stream);
        assert_eq!(watched.pool.stats().reservation_count, 3);
        assert_eq!(watched.usage(), 13);
        for held in held.into_iter().chain([large]) {
            watched.free(held, &stream);
        }
        watched.assert_intact();
    });
}

#[test]
fn memory_is_found_again_after_running_out() {
    Rig::everywhere(|rig| {
        let mut config = config(PAGE, 0);
        config.limit_bytes = Some(64 * PAGE);
        let watched = rig.pool(&config);
        let stream = rig.stream();
        let mut held: Vec<_> = (0..8).map(|_| watched.pages(8, &stream)).collect();
        let error = watched.try_malloc(8 * PAGE, &stream).unwrap_err();
        assert!(
            matches!(error, vpmm::Error::OutOfMemory { requested_bytes, free_bytes: 0, live_bytes, mapped_bytes, limit_bytes: Some(limit), .. }
            if requested_bytes == 8 * PAGE && live_bytes == 64 * PAGE && mapped_bytes == 64 * PAGE && limit == 64 * PAGE),
            "{error}"
        );
        watched.free(held.remove(3), &stream);
        held.push(watched.pages(4, &stream));
        held.push(watched.pages(4, &stream));
        assert!(watched.try_malloc(PAGE, &stream).unwrap_err().is_out_of_memory());
        held.drain(..).for_each(|held| watched.free(held, &stream));
        held.push(watched.pages(64, &stream));
        assert_eq!(watched.usage(), 64);
        held.drain(..).for_each(|held| watched.free(held, &stream));
        watched.assert_intact();
    });
}

#[test]
fn the_devices_own_end_is_out_of_memory_too() {
    let sim = cuda_sim::Simulator::builder().memory_bytes(64 << 20).build().unwrap();
    let rig = Rig::on(sim);
    let watched = rig.small_pool(0);
    let stream = rig.stream();
    let held = watched.pages(16, &stream);
    // Others have some of it.
    let others = rig.small_pool(0);
    let of_others = others.pages(8, &stream);
    let before = watched.usage();
    let made = || rig.driver.calls().count("cuMemCreate");
    for (pages, makes) in [(16, true), (17, false), (64, false), (1 << 20, false)] {
        let made_before = made();
        let error = watched.try_malloc(pages * PAGE, &stream).unwrap_err();
        assert!(error.is_out_of_memory(), "{error}");
        assert_eq!(watched.usage(), before, "what the request had made is given back");
        // What the device could never have is not found out page by page.
        assert_eq!(made() > made_before, makes, "{pages} pages");
    }
    watched.free(held, &stream);
    others.free(of_others, &stream);
    others.assert_intact();
    watched.assert_intact();
}

#[test]
fn cycles_of_fragmentation_need_no_more_memory() {
    Rig::everywhere(|rig| {
        let watched = rig.small_pool(8);
        let stream = rig.stream();
        for _ in 0..3 {
            let held = [(); 4].map(|()| watched.pages(2, &stream));
            watched.free(held[0], &stream);
            watched.free(held[2], &stream);
            let four = watched.pages(4, &stream);
            assert_eq!(watched.usage(), 8);
            for held in [held[1], held[3], four] {
                watched.free(held, &stream);
            }
        }
        watched.assert_intact();
    });
}

#[test]
fn two_of_three_neighbours_serve_their_sum() {
    Rig::everywhere(|rig| {
        for (order, sum) in [([1, 0].as_slice(), 4), (&[0, 1], 4), (&[0, 2, 1], 6)] {
            let watched = rig.small_pool(0);
            let stream = rig.stream();
            let held = [(); 3].map(|()| watched.pages(2, &stream));
            order.iter().for_each(|i| watched.free(held[*i], &stream));
            let whole = watched.pages(sum, &stream);
            assert_eq!((whole.address(), watched.usage()), (held[0].address(), 6));
            watched.assert_intact();
        }
    });
}

#[test]
fn regions_of_two_busy_streams_stay_apart_and_serve_their_own() {
    Rig::everywhere(|rig| {
        let watched = rig.small_pool(0);
        let (a, b) = (rig.stream(), rig.stream());
        let of_a = watched.pages(2, &a);
        let of_b = watched.pages(2, &b);
        let stalls = (rig.stall(a.handle()), rig.stall(b.handle()));
        watched.free(of_a, &a);
        watched.free(of_b, &b);
        // Both are free and adjacent, yet neither stream may have the other's yet.
        let of_b_again = watched.pages(2, &b);
        assert_eq!((of_b_again.address(), watched.usage()), (of_b.address(), 4));
        let of_a_again = watched.pages(2, &a);
        assert_eq!((of_a_again.address(), watched.usage()), (of_a.address(), 4));
        watched.free(of_a_again, &a);
        watched.free(of_b_again, &b);
        drop(stalls);
        rig.device.synchronize().unwrap();
        // Both have finished: one stream gets both, in place.
        let whole = watched.pages(4, &b);
        assert_eq!((whole.address(), watched.usage(), watched.moved()), (of_a.address(), 4, 0));
        watched.free(whole, &b);
        watched.assert_intact();
    });
}

#[test]
fn free_pages_between_allocations_are_gathered() {
    Rig::everywhere(|rig| {
        let watched = rig.small_pool(0);
        let stream = rig.stream();
        let held = [(); 5].map(|()| watched.pages(2, &stream));
        for i in [0, 2, 4] {
            watched.free(held[i], &stream);
        }
        let _five = watched.pages(5, &stream);
        assert_eq!(watched.usage(), 10);
        let _one = watched.pages(1, &stream);
        assert_eq!(watched.usage(), 10);
        let _grown = watched.pages(1, &stream);
        assert_eq!(watched.usage(), 11);
        watched.assert_intact();
    });
}

#[test]
fn holes_are_used_again() {
    Rig::everywhere(|rig| {
        let watched = rig.small_pool(0);
        let stream = rig.stream();
        let (a, b) = (watched.pages(2, &stream), watched.pages(2, &stream));
        let c = watched.pages(2, &stream);
        watched.free(a, &stream);
        watched.free(b, &stream);
        let four = watched.pages(4, &stream);
        assert_eq!(four.address(), a.address());
        watched.free(four, &stream);
        watched.free(c, &stream);
        let seven = watched.pages(7, &stream);
        assert_eq!(watched.usage(), 7);
        watched.free(seven, &stream);
        stream.synchronize().unwrap();
        let hole_bytes = watched.pool.stats().hole_bytes;
        let again = watched.pages(7, &stream);
        assert_eq!(watched.pool.stats().hole_bytes, hole_bytes, "no address is lost");
        watched.free(again, &stream);
        watched.assert_intact();
    });
}

#[test]
fn new_pages_join_what_is_free_before_them() {
    Rig::everywhere(|rig| {
        let watched = rig.small_pool(0);
        let stream = rig.stream();
        let two = watched.pages(2, &stream);
        watched.free(two, &stream);
        let four = watched.pages(4, &stream);
        assert_eq!((four.address(), watched.usage(), watched.moved()), (two.address(), 4, 0));
        watched.free(four, &stream);
        let (low, high) = (watched.pages(2, &stream), watched.pages(2, &stream));
        watched.free(low, &stream);
        let again = watched.pages(4, &stream);
        assert_eq!(watched.usage(), 6);
        for held in [high, again] {
            watched.free(held, &stream);
        }
        watched.assert_intact();
    });
}

#[test]
fn various_orders_need_no_more_than_their_sum() {
    Rig::everywhere(|rig| {
        let watched = rig.small_pool(0);
        let stream = rig.stream();
        let held = [(); 5].map(|()| watched.pages(2, &stream));
        for i in [1, 3, 0, 4, 2] {
            watched.free(held[i], &stream);
        }
        let ten = watched.pages(10, &stream);
        assert_eq!((watched.usage(), watched.moved()), (10, 0));
        watched.free(ten, &stream);
        let six = watched.pages(6, &stream);
        let four = watched.pages(4, &stream);
        watched.free(six, &stream);
        let seven = watched.pages(7, &stream);
        assert_eq!(watched.usage(), 11);
        for held in [four, seven] {
            watched.free(held, &stream);
        }
        watched.assert_intact();
    });
}

#[test]
fn what_is_left_of_a_taken_region_keeps_its_claim() {
    Rig::everywhere(|rig| {
        let mut config = config(PAGE, 0);
        config.limit_bytes = Some(3 * PAGE);
        let watched = rig.pool(&config);
        let (a, b) = (rig.stream(), rig.stream());
        let two = watched.pages(2, &a);
        let live = watched.pages(1, &b);
        let stall = rig.stall(a.handle());
        watched.free(two, &a);
        // At the limit, so that only the other stream's memory is left: one page of it moves, and
        // stream B's next work waits for A on the GPU.
        let one = watched.pages(1, &b);
        assert_eq!((watched.usage(), watched.moved()), (3, 1));
        let left: Vec<_> =
            watched.pool.layout().to_string().matches("[-1]").map(str::len).collect();
        assert_eq!(left.len(), 1, "{}", watched.layout());
        let stats = watched.pool.stats();
        assert_eq!((stats.pending_bytes, stats.zombie_bytes, stats.idle_bytes), (PAGE, PAGE, 0));
        // A itself needs no wait for what is left.
        let rest = watched.pages(1, &a);
        assert_eq!((watched.usage(), watched.moved()), (3, 1));
        drop(stall);
        for (held, stream) in [(live, &b), (one, &b), (rest, &a)] {
            watched.free(held, stream);
        }
        watched.assert_intact();
    });
}

#[test]
fn zombies_are_unmapped_when_their_stream_has_finished_and_not_before() {
    Rig::everywhere(|rig| {
        let watched = rig.small_pool(0);
        let stream = rig.stream();
        let held = [(); 4].map(|()| watched.pages(1, &stream));
        let stall = rig.stall(stream.handle());
        watched.free(held[0], &stream);
        watched.free(held[2], &stream);
        let two = watched.pages(2, &stream);
        assert_eq!(watched.layout(), "[~1][1][~1][1][+2]");
        let unmaps = |watched: &Watched<'_>| watched.rig.driver.calls().count("cuMemUnmap");
        let before = unmaps(&watched);
        let other = rig.stream();
        let one = watched.pages(1, &other);
        assert_eq!(unmaps(&watched), before, "the stream is still busy");
        drop(stall);
        stream.synchronize().unwrap();
        watched.free(one, &other);
        let again = watched.pages(1, &other);
        assert_eq!(watched.pool.stats().zombie_bytes, 0, "{}", watched.layout());
        for (held, stream) in
            [(held[1], &stream), (held[3], &stream), (two, &stream), (again, &other)]
        {
            watched.free(held, stream);
        }
        watched.assert_intact();
    });
}

/// A stream that has ended needs it no more, and nobody can wait for it by its name: what it freed is everybody's when
/// its work is known to be done, though a question may give away nothing else; also where the stream was only lent,
/// which keeps what it frees when it comes again.
#[test]
fn what_an_ended_stream_freed_is_everybodys_where_questions_give_nothing_away() {
    Rig::everywhere(|rig| {
        for (asked_before, lent) in [(false, false), (true, false), (false, true), (true, true)] {
            let mut config = config(PAGE, 0);
            (config.reuse.opportunistic, config.reuse.internal_dependencies) = (false, false);
            let watched = rig.pool(&config);
            let own = rig.stream();
            let (raw, foreign) = make(rig, 1);
            // SAFETY: the stream lives to the end of the round.
            let lend = || unsafe { Stream::borrowed(&rig.device, foreign) }.unwrap();
            let ends = if lent { lend() } else { rig.stream() };
            let held = watched.pages(3, &ends);
            let noted = watched.pages(1, &own);
            rig.order(&own, &ends);
            noted.check(rig, &ends);
            watched.pool.record_stream(noted.ptr, &ends).unwrap();
            let stall = rig.stall(ends.handle());
            watched.free(held, &ends);
            if asked_before {
                drop(stall);
                // Why the pool asks: this waits for a use there.
                watched.free(noted, &own);
                // Past the library, so that nobody tells it.
                call!(rig.driver, cuCtxSynchronize());
                assert_eq!(watched.pages(1, &own).address(), noted.address());
                drop(ends);
            } else {
                drop(ends);
                let other = watched.pages(3, &own);
                assert_ne!(other.address(), held.address(), "its work is not done");
                drop(stall);
                call!(rig.driver, cuCtxSynchronize());
            }
            let again = watched.pages(3, &own);
            assert_eq!(again.address(), held.address(), "{}", watched.layout());
            if lent {
                let back = lend();
                rig.order(&own, &back);
                watched.free(again, &back);
                call!(rig.driver, cuStreamSynchronize(back.handle().raw()));
                let other = watched.pages(3, &own);
                assert_ne!(other.address(), held.address(), "{}", watched.layout());
                assert_eq!(watched.pages(3, &back).address(), held.address());
            }
            watched.assert_intact();
            call!(rig.driver, cuStreamDestroy_v2(raw));
        }
    });
}

#[test]
fn everything_is_given_back_at_the_end() {
    let rig = Rig::simulated(Schedule::Late { patience: 100 });
    let sim = rig.sim.clone().expect("a simulated rig");
    {
        let watched = rig.small_pool(3);
        let stream = rig.stream();
        let held = [(); 4].map(|()| watched.pages(1, &stream));
        watched.free(held[1], &stream);
        watched.free(held[3], &stream);
        let _never_freed = watched.pages(2, &stream);
        let _small = watched.malloc(1000, &stream);
    }
    drop(rig);
    sim.assert_clean();
    let leaks = sim.leaks();
    assert!(leaks.is_empty(), "{leaks:?}");
}

#[test]
fn small_requests_go_to_the_stream_ordered_allocator() {
    Rig::everywhere(|rig| {
        let watched = rig.small_pool(0);
        let stream = rig.stream();
        let before = rig.driver.calls();
        let small = watched.malloc(1 << 20, &stream);
        watched.free(small, &stream);
        let calls = rig.driver.calls().since(&before);
        assert_eq!((calls.count("cuMemAllocFromPoolAsync"), calls.count("cuMemFreeAsync")), (1, 1));
        assert_eq!((calls.count("cuMemCreate"), watched.usage()), (0, 0));
        // No page at all.
        let mut config = vpmm::PagedConfig::default();
        config.page_size_bytes = Some(u64::MAX);
        let disabled = rig.pool(&config);
        let large = disabled.malloc(64 << 20, &stream);
        assert_eq!((disabled.usage(), disabled.pool.stats().reserved_bytes), (0, 0));
        disabled.free(large, &stream);
        disabled.assert_intact();
        watched.assert_intact();
    });
}

#[test]
fn two_pools_and_a_foreign_context_stay_apart() {
    Rig::everywhere(|rig| {
        let (one, two) = (rig.small_pool(1), rig.small_pool(1));
        let stream = rig.stream();
        // No context is current on this thread, as in a program that uses the driver alone.
        call!(rig.driver, cuCtxSetCurrent(std::ptr::null_mut()));
        let (a, b) = (one.pages(1, &stream), two.pages(1, &stream));
        let error = one.pool.free(b.ptr, &stream).unwrap_err();
        assert!(matches!(error, vpmm::Error::ForeignPointer { .. }), "{error}");
        one.free(a, &stream);
        two.free(b, &stream);
        one.assert_intact();
        two.assert_intact();
    });
}

/// Many pages that a stream freed one by one and may still be using are joined in one look at each: a request that
/// needs them together costs less than the frees did.
#[test]
fn a_run_of_many_frees_is_looked_at_once() {
    const PAGES: u64 = 12_000;
    let sim = cuda_sim::Simulator::builder().memory_bytes(64 * GIB).build().unwrap();
    let rig = Rig::with(vpmm::Driver::new(sim.driver()).unwrap(), sim);
    let mut config = config(PAGE, PAGES);
    config.va_size_bytes = 2 * PAGES * PAGE;
    let pool = vpmm::Pool::paged(&rig.device, &config).unwrap();
    let stream = rig.stream();
    let malloc = |pages: u64| pool.malloc((pages * PAGE) as usize, &stream).unwrap();
    let measured = |_| {
        let held: Vec<_> = (0..PAGES).map(|_| malloc(1)).collect();
        let stall = rig.stall(stream.handle());
        let start = std::time::Instant::now();
        held.into_iter().for_each(|ptr| pool.free(ptr, &stream).unwrap());
        let freed = start.elapsed();
        let start = std::time::Instant::now();
        let all = malloc(PAGES);
        let joined = start.elapsed();
        assert_eq!(pool.stats().pages_created, PAGES, "the case that is meant");
        drop(stall);
        pool.free(all, &stream).unwrap();
        (joined, freed)
    };
    // A machine that has other things to do may hold up one or the other.
    let measured: Vec<_> = (0..3).map(measured).collect();
    assert!(measured.iter().any(|(joined, freed)| joined < freed), "{measured:?}");
    pool.validate().unwrap();
}
