//! Everything at once, in programs that seeds stand for: several pools, heaps that sleep, graphs, captures with
//! forks, uses on further streams, marks, limits, trims, exports, peers, streams and threads that come and go,
//! pools that end with and without what is allocated, faults.
//!
//! Threads take turns, and every pool is checked after each. `VPMM_TOGETHER_FIRST`, `VPMM_TOGETHER_CASES` and
//! `VPMM_TOGETHER_STEPS` choose other programs than the first few, `VPMM_TOGETHER_SAYS` has each tell its steps.

#[path = "../heaps/graph.rs"]
#[allow(dead_code, reason = "a part is used")]
mod graph;
#[allow(unused_macros, reason = "no driver function is held here")]
#[path = "../support/pools.rs"]
mod support;
mod world;

fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().and_then(|set| set.parse().ok()).unwrap_or(otherwise)
}

fn programs(cases: u64, timed: bool) {
    let first = number("VPMM_TOGETHER_FIRST", 0);
    for seed in first..first + number("VPMM_TOGETHER_CASES", cases) {
        println!("program {seed}");
        world::run(seed, timed, number("VPMM_TOGETHER_STEPS", u64::MAX));
    }
    println!("{:#?}", world::reached());
}

#[test]
fn programs_of_everything() {
    programs(4, false);
}

/// What a longer run came upon: a released graph's heap that goes back while the stream that alone had used it
/// captures again.
#[test]
fn a_program_that_was_met() {
    world::run(501_406, false, u64::MAX);
}

/// With helpers, waits up to a time and moves by the clock: a seed is not one run.
#[test]
#[ignore = "takes minutes"]
fn programs_of_everything_by_the_clock() {
    programs(1000, true);
}
