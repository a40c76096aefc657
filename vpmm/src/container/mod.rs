//! Memory with an owner: what is freed on its stream at drop.
//!
//! A container remembers its resource and its stream (a clone, which keeps the stream alive). What it
//! does is enqueued there, and what is enqueued there later finds it done; nothing else is ordered, as
//! everywhere in CUDA: a kernel on another stream that uses a container's memory is ordered by its
//! caller ([`Stream::wait_for`](crate::Stream::wait_for)). Two containers that meet in one call
//! (`copy_from`) are ordered by it, by events where their streams differ.
//!
//! | | memory | contents |
//! |---|---|---|
//! | [`DeviceBuffer`] | device | bytes |
//! | [`DeviceVec`], [`DeviceScalar`] | device | plain old data: [`Pod`] |
//! | [`PinnedVec`] | page-locked, the host's | plain old data, a slice for the host |
//!
//! Copies between device and host return when they are done, and check lengths; those that go on
//! behind the host's back own the host's side ([`Transfer`]).

mod block;
mod buffer;
mod copy;
mod home;
mod pinned;
mod scalar;
mod slice;
mod transfer;
mod vec;

pub use bytemuck::Pod;

pub use buffer::DeviceBuffer;
pub use pinned::PinnedVec;
pub use scalar::DeviceScalar;
pub use slice::{DeviceSlice, DeviceSliceMut};
pub use transfer::Transfer;
pub use vec::DeviceVec;
