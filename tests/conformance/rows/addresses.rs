//! Reservations.

use super::*;

pub(crate) fn rows() -> Vec<Row> {
    vec![
        row("reserve: one granule", SUCCESS, |p| answer(p.reserve(p.g))),
        row("reserve: 1 TiB", SUCCESS, |p| answer(p.reserve(TIB))),
        row("reserve: 100 TiB", OUT_OF_MEMORY, |p| answer(p.reserve(100 * TIB))),
        row("reserve: size 0", INVALID_VALUE, |p| answer(p.reserve(0))),
        row("reserve: half a granule", INVALID_VALUE, |p| answer(p.reserve(p.g / 2))),
        row("reserve: alignment 3", INVALID_VALUE, |p| answer(p.reserve_with(p.g, 3, 0, 0))),
        row("reserve: flags 1", INVALID_VALUE, |p| answer(p.reserve_with(p.g, 0, 0, 1))),
        row("reserve: a taken address as hint: another address", SUCCESS, |p| {
            let taken = p.reserve(p.g)?;
            let at = p.reserve_with(p.g, 0, taken, 0)?;
            ensure(at != taken, "the second reservation is elsewhere")?;
            Ok(CUresult::CUDA_SUCCESS)
        }),
        row("reserve: a free address as hint: that address", SUCCESS, |p| {
            let free = p.reserve(4 * p.g)?;
            p.unreserve(free, 4 * p.g)?;
            ensure(p.reserve_with(p.g, 0, free, 0)? == free, "the hint is taken")?;
            Ok(CUresult::CUDA_SUCCESS)
        }),
        row("reserve: a granule and a half", INVALID_VALUE, |p| answer(p.reserve(p.g * 3 / 2))),
        row("reserve: alignment 512 MiB is honoured", SUCCESS, |p| {
            let at = p.reserve_with(p.g, 512 * MIB, 0, 0)?;
            ensure(at.is_multiple_of(512 * MIB), "the address is a multiple of 512 MiB")?;
            Ok(CUresult::CUDA_SUCCESS)
        }),
        row("reserve: alignment 1 GiB is honoured", SUCCESS, |p| {
            let at = p.reserve_with(p.g, GIB, 0, 0)?;
            ensure(at.is_multiple_of(GIB), "the address is a multiple of 1 GiB")?;
            Ok(CUresult::CUDA_SUCCESS)
        }),
        row("unreserve: empty", SUCCESS, |p| {
            let at = p.reserve(4 * p.g)?;
            answer(p.unreserve(at, 4 * p.g))
        }),
        row("unreserve: twice", INVALID_VALUE, |p| {
            let at = p.reserve(p.g)?;
            p.unreserve(at, p.g)?;
            answer(p.unreserve(at, p.g))
        }),
        row("unreserve: half of it", INVALID_VALUE, |p| {
            let at = p.reserve(2 * p.g)?;
            answer(p.unreserve(at, p.g))
        }),
        row("unreserve: from its middle", INVALID_VALUE, |p| {
            let at = p.reserve(2 * p.g)?;
            answer(p.unreserve(at + p.g, p.g))
        }),
        row("unreserve: while mapped", INVALID_VALUE, |p| {
            let at = p.open(&[p.g])?;
            answer(p.unreserve(at, p.g))
        }),
        row("unreserve: after unmapping", SUCCESS, |p| {
            let at = p.open(&[p.g])?;
            p.unmap(at, p.g)?;
            answer(p.unreserve(at, p.g))
        }),
    ]
}
