//! Values: elements, fills, types of many lengths.

use std::fmt::Debug;

use cuda_sim::Schedule;
use vpmm::{DeviceBuffer, DeviceScalar, DeviceVec, Error, Pod};

use crate::resources::{Any, each, pool};
use crate::support::Rig;

/// Elements, fills and copies of one type.
fn of_type<T: Pod + PartialEq + Debug>(rig: &Rig, resource: &Any, make: impl Fn(usize) -> T) {
    let stream = rig.stream();
    let host: Vec<T> = (0..1_000).map(&make).collect();
    let mut values = DeviceVec::from_slice(&host, &stream, resource).unwrap();
    assert_eq!((values.len(), values.capacity()), (1_000, 1_000));
    assert_eq!(values.to_vec().unwrap(), host);
    for index in [0, 1, 500, 999] {
        assert_eq!(values.get(index).unwrap(), host[index]);
        values.set(index, make(index + 5_000)).unwrap();
        assert_eq!(values.get(index).unwrap(), make(index + 5_000));
    }
    assert_eq!(values.get(2).unwrap(), host[2], "its neighbours stay");
    values.slice_mut(3..998).unwrap().fill(make(77)).unwrap();
    let now = values.to_vec().unwrap();
    assert_eq!((now[2], now[998]), (host[2], host[998]));
    assert!(now[3..998].iter().all(|value| *value == make(77)));
    values.as_mut_slice().fill_zero().unwrap();
    assert!(values.to_vec().unwrap().iter().all(|value| *value == T::zeroed()));
    for index in [1_000, usize::MAX] {
        assert!(matches!(values.get(index), Err(Error::OutOfRange { len: 1_000, .. })));
        assert!(matches!(values.set(index, make(0)), Err(Error::OutOfRange { len: 1_000, .. })));
    }
    let scalar = DeviceScalar::new(make(3), &stream, resource).unwrap();
    assert_eq!(scalar.get().unwrap(), make(3));
}

#[test]
fn values_of_every_length() {
    each(|rig, resource| {
        of_type(rig, resource, |at| at as u8);
        of_type(rig, resource, |at| at as u16 * 3);
        of_type(rig, resource, |at| at as u32 * 0x1_0001);
        of_type(rig, resource, |at| at as u64 * 0x1_0000_0001);
        of_type(rig, resource, |at| at as f32 + 0.5);
        of_type(rig, resource, |at| at as f64 - 0.25);
        of_type(rig, resource, |at| at as u128 * 0x1_0000_0001);
        of_type(rig, resource, |at| [at as u8, 1, 2]);
        of_type(rig, resource, |at| [at as u8, 3, (at >> 8) as u8, 5, 6]);
        of_type(rig, resource, |at| [at as u32, 7, 8]);
        of_type(rig, resource, |at| [at as u64; 3]);
        of_type(rig, resource, |at| [at as u16; 33]);
    });
}

#[test]
fn long_fills() {
    let rig = Rig::simulated(Schedule::Random);
    let (stream, pool) = (rig.stream(), pool(&rig));
    // The pattern is made once and doubled: lengths around its borders.
    for len in [1, 170, 171, 172, 341, 342, 343, 5_000, 65_537] {
        let value = [1_u64, 2, len as u64];
        let values = DeviceVec::filled(value, len, &stream, &pool).unwrap();
        assert!(values.to_vec().unwrap().iter().all(|got| *got == value), "{len}");
    }
}

#[test]
fn it_grows_with_values() {
    each(|rig, resource| {
        let stream = rig.stream();
        let mut values = DeviceVec::from_slice(&[1_i32, 2, 3], &stream, resource).unwrap();
        values.resize(6, -1).unwrap();
        assert_eq!(values.to_vec().unwrap(), [1, 2, 3, -1, -1, -1]);
        values.resize(2, 0).unwrap();
        values.reserve(100).unwrap();
        assert!(values.capacity() >= 100);
        values.resize_uninit(3).unwrap();
        values.set(2, 9).unwrap();
        values.shrink_to_fit().unwrap();
        assert_eq!((values.capacity(), values.to_vec().unwrap()), (3, vec![1, 2, 9]));
        values.release().unwrap();
    });
}

#[test]
fn sizes_that_overflow() {
    let rig = Rig::simulated(Schedule::Eager);
    let (stream, pool) = (rig.stream(), pool(&rig));
    let mut values = DeviceVec::from_slice(&[1_u64], &stream, &pool).unwrap();
    let errors = [
        DeviceVec::<u64, _>::uninit(usize::MAX / 8 + 1, &stream, &pool).map(drop).unwrap_err(),
        values.resize(usize::MAX / 2, 0).unwrap_err(),
        values.reserve(usize::MAX).unwrap_err(),
    ];
    for error in errors {
        assert!(matches!(error, Error::SizeOverflow { .. }), "{error}");
    }
    assert_eq!(values.to_vec().unwrap(), [1]);
    // No memory at all, and values without any.
    let none = DeviceVec::<u64, _>::uninit(0, &stream, &pool).unwrap();
    assert_eq!((none.ptr().is_null(), none.to_vec().unwrap()), (true, vec![]));
    let empty = DeviceVec::from_slice(&[(); 5], &stream, &pool).unwrap();
    assert_eq!((empty.len(), empty.get(4).unwrap()), (5, ()));
    assert!(empty.get(5).is_err());
}

#[test]
fn bytes_as_values_and_back() {
    let rig = Rig::simulated(Schedule::Eager);
    let (stream, pool) = (rig.stream(), pool(&rig));
    let buffer = DeviceBuffer::from_slice(&[1, 0, 0, 0, 2, 0, 0, 0], &stream, &pool).unwrap();
    let address = buffer.ptr();
    let values = DeviceVec::<u32, _>::from_buffer(buffer).unwrap();
    assert_eq!((values.ptr(), values.to_vec().unwrap()), (address, vec![1, 2]));
    let mut buffer = values.into_buffer();
    buffer.resize(7).unwrap();
    let (buffer, error) = DeviceVec::<u32, _>::from_buffer(buffer).map(drop).unwrap_err();
    assert!(matches!(error, Error::LengthMismatch { given: 7, len: 4 }), "{error}");
    assert_eq!(buffer.len(), 7);
}

/// Fills of nothing, whatever the value.
#[test]
fn nothing_is_filled() {
    let rig = Rig::simulated(Schedule::Eager);
    let (stream, pool) = (rig.stream(), pool(&rig));
    let long = DeviceVec::filled(0x0102_u64, 0, &stream, &pool).unwrap();
    let short = DeviceVec::filled(0x0102_u16, 0, &stream, &pool).unwrap();
    let even = DeviceVec::filled(0_u8, 0, &stream, &pool).unwrap();
    assert!(long.is_empty() && short.is_empty() && even.is_empty());
}
