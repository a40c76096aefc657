//! Borrowed parts of containers.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Bound, RangeBounds};

use bytemuck::Pod;

use super::copy;
use super::home::Home;
use crate::error::{Error, Result};
use crate::stream::Stream;
use crate::units::DevicePtr;

/// Values on a device, borrowed from a container.
pub struct DeviceSlice<'a, T> {
    address: u64,
    len: usize,
    home: &'a Home,
    values: PhantomData<&'a [T]>,
}

/// The only borrow of values on a device.
pub struct DeviceSliceMut<'a, T> {
    address: u64,
    len: usize,
    home: &'a Home,
    values: PhantomData<&'a mut [T]>,
}

impl<T> Clone for DeviceSlice<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for DeviceSlice<'_, T> {}

/// What of `len` values a range is, as a first one and a count.
fn part(len: usize, range: impl RangeBounds<usize>) -> Result<(usize, usize)> {
    // Values may be `usize::MAX` where they have no bytes: nothing begins or ends behind that.
    let first = match range.start_bound() {
        Bound::Included(first) => Some(*first),
        Bound::Excluded(before) => before.checked_add(1),
        Bound::Unbounded => Some(0),
    };
    let end = match range.end_bound() {
        Bound::Included(last) => last.checked_add(1),
        Bound::Excluded(end) => Some(*end),
        Bound::Unbounded => Some(len),
    };
    match (first, end) {
        (Some(first), Some(end)) if first <= end && end <= len => Ok((first, end - first)),
        (first, end) => {
            let [first, end] = [first, end].map(|bound| bound.unwrap_or(usize::MAX));
            Err(Error::OutOfRange { first, end, len })
        }
    }
}

fn check_lengths(host: usize, device: usize) -> Result<()> {
    if host == device { Ok(()) } else { Err(Error::LengthMismatch { given: host, len: device }) }
}

impl<'a, T: Pod> DeviceSlice<'a, T> {
    pub(super) fn new(home: &'a Home, address: u64, len: usize) -> Self {
        Self { address, len, home, values: PhantomData }
    }

    /// The number of values.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The address of the first value, for kernels.
    pub fn ptr(&self) -> DevicePtr {
        DevicePtr::from_address(self.address)
    }

    /// The stream of the container.
    pub fn stream(&self) -> &Stream {
        self.home.given()
    }

    /// A part of the values.
    ///
    /// # Errors
    /// [`Error::OutOfRange`].
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Result<Self> {
        let (first, len) = part(self.len, range)?;
        Ok(Self::new(self.home, self.address + (first * size_of::<T>()) as u64, len))
    }

    /// One value. The host waits for the stream.
    ///
    /// # Errors
    /// [`Error::OutOfRange`], [`Error::StreamCapturing`], [`Error::Driver`], [`Error::ContextLost`].
    pub fn get(&self, index: usize) -> Result<T> {
        let one = self.slice(index..=index)?;
        let mut value = T::zeroed();
        copy::download(self.home, bytemuck::bytes_of_mut(&mut value), one.address)?;
        Ok(value)
    }

    /// Copies all values to the host, and waits for that.
    ///
    /// # Errors
    /// [`Error::LengthMismatch`] unless the host has room for exactly as many;
    /// [`Error::StreamCapturing`], [`Error::Driver`], [`Error::ContextLost`].
    pub fn copy_to_slice(&self, host: &mut [T]) -> Result<()> {
        check_lengths(host.len(), self.len)?;
        copy::download(self.home, bytemuck::cast_slice_mut(host), self.address)
    }

    /// All values on the host.
    ///
    /// # Errors
    /// As [`copy_to_slice`](Self::copy_to_slice).
    pub fn to_vec(&self) -> Result<Vec<T>> {
        let mut host = vec![T::zeroed(); self.len];
        self.copy_to_slice(&mut host)?;
        Ok(host)
    }

    /// Enqueues a copy to the host, and does not wait for it. `cuMemcpyDtoHAsync`. The safe way for
    /// copies that go on is [`PinnedVec::download`](super::PinnedVec::download).
    ///
    /// # Errors
    /// [`Error::LengthMismatch`], [`Error::Driver`], [`Error::ContextLost`].
    ///
    /// # Safety
    /// Nobody uses the host's values before the copy is done: until the [stream](Self::stream) has been
    /// waited for, or, where it captures a graph, for all launches of that.
    pub unsafe fn copy_to_slice_async(&self, host: &mut [T]) -> Result<()> {
        check_lengths(host.len(), self.len)?;
        let stream = self.home.turn()?;
        let host: &mut [u8] = bytemuck::cast_slice_mut(host);
        if host.is_empty() {
            return Ok(());
        }
        // SAFETY: the caller vouches for it.
        unsafe { copy::enqueue_download(&stream, host.as_mut_ptr(), self.address, host.len()) }
    }

    /// The same memory as so many values, which it is long enough for.
    pub(super) fn of<U: Pod>(self, len: usize) -> DeviceSlice<'a, U> {
        DeviceSlice::new(self.home, self.address, len)
    }

    pub(super) fn home(&self) -> &'a Home {
        self.home
    }

    pub(super) fn address(&self) -> u64 {
        self.address
    }
}

impl<'a, T: Pod> DeviceSliceMut<'a, T> {
    pub(super) fn new(home: &'a Home, address: u64, len: usize) -> Self {
        Self { address, len, home, values: PhantomData }
    }

    /// The same, to be read from.
    pub fn as_slice(&self) -> DeviceSlice<'_, T> {
        DeviceSlice::new(self.home, self.address, self.len)
    }

    /// The number of values.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The address of the first value, for kernels.
    pub fn ptr(&self) -> DevicePtr {
        DevicePtr::from_address(self.address)
    }

    /// The stream of the container.
    pub fn stream(&self) -> &Stream {
        self.home.given()
    }

    /// A part of the values.
    ///
    /// # Errors
    /// [`Error::OutOfRange`].
    pub fn slice_mut(&mut self, range: impl RangeBounds<usize>) -> Result<DeviceSliceMut<'_, T>> {
        let (first, len) = part(self.len, range)?;
        let address = self.address + (first * size_of::<T>()) as u64;
        Ok(DeviceSliceMut::new(self.home, address, len))
    }

    /// A part of the values, for as long as they were borrowed.
    ///
    /// # Errors
    /// [`Error::OutOfRange`].
    pub fn into_part(self, range: impl RangeBounds<usize>) -> Result<Self> {
        let (first, len) = part(self.len, range)?;
        Ok(Self::new(self.home, self.address + (first * size_of::<T>()) as u64, len))
    }

    /// The first `at` values and the others.
    ///
    /// # Errors
    /// [`Error::OutOfRange`].
    pub fn split_at_mut(self, at: usize) -> Result<(Self, Self)> {
        let (_, rest) = part(self.len, at..)?;
        let second = self.address + (at * size_of::<T>()) as u64;
        Ok((Self::new(self.home, self.address, at), Self::new(self.home, second, rest)))
    }

    /// Sets one value. A value of up to 16 bytes in fours (or of 1 or 2) travels with the command, so
    /// that the host does not wait and a capture may go on; for others it waits for the stream.
    ///
    /// # Errors
    /// [`Error::OutOfRange`], [`Error::StreamCapturing`], [`Error::Driver`], [`Error::ContextLost`].
    pub fn set(&mut self, index: usize, value: T) -> Result<()> {
        let one = self.slice_mut(index..=index)?;
        copy::write(one.home, one.address, &value)
    }

    /// Sets every value to this one. The host waits only where a `T` has more than 4 bytes (or 3) that
    /// are not all equal.
    ///
    /// # Errors
    /// [`Error::StreamCapturing`], [`Error::Driver`], [`Error::ContextLost`].
    pub fn fill(&mut self, value: T) -> Result<()> {
        copy::fill(self.home, self.address, &value, self.len)
    }

    /// Sets every byte to 0, without waiting. `cuMemsetD8Async`.
    ///
    /// # Errors
    /// [`Error::Driver`], [`Error::ContextLost`].
    pub fn fill_zero(&mut self) -> Result<()> {
        let stream = self.home.turn()?;
        copy::fill_bytes(&stream, self.address, 0, self.len * size_of::<T>())
    }

    /// Copies values from the host, and waits for that.
    ///
    /// # Errors
    /// [`Error::LengthMismatch`] unless there are exactly as many; [`Error::StreamCapturing`],
    /// [`Error::Driver`], [`Error::ContextLost`].
    pub fn copy_from_slice(&mut self, host: &[T]) -> Result<()> {
        check_lengths(host.len(), self.len)?;
        copy::upload(self.home, self.address, bytemuck::cast_slice(host))
    }

    /// Enqueues a copy from the host, and does not wait for it. `cuMemcpyHtoDAsync`. The safe way for
    /// copies that go on is [`PinnedVec::upload`](super::PinnedVec::upload).
    ///
    /// # Errors
    /// [`Error::LengthMismatch`], [`Error::Driver`], [`Error::ContextLost`].
    ///
    /// # Safety
    /// The host's values stay as they are until the copy is done: until the [stream](Self::stream) has
    /// been waited for, or, where it captures a graph, for all launches of that.
    pub unsafe fn copy_from_slice_async(&mut self, host: &[T]) -> Result<()> {
        check_lengths(host.len(), self.len)?;
        let stream = self.home.turn()?;
        let host: &[u8] = bytemuck::cast_slice(host);
        if host.is_empty() {
            return Ok(());
        }
        // SAFETY: the caller vouches for it.
        unsafe { copy::enqueue_upload(&stream, self.address, host.as_ptr(), host.len()) }
    }

    /// Copies values from another container, without waiting: after what is enqueued on either's
    /// stream, and before what will be. Two events where the streams differ.
    ///
    /// # Errors
    /// [`Error::LengthMismatch`] unless there are exactly as many; [`Error::StreamCapturing`] where the
    /// streams differ and one captures; [`Error::Driver`], [`Error::ContextLost`].
    pub fn copy_from(&mut self, other: &DeviceSlice<'_, T>) -> Result<()> {
        check_lengths(other.len, self.len)?;
        let bytes = self.len * size_of::<T>();
        copy::between(self.home, self.address, other.home, other.address, bytes)
    }

    /// The same memory as so many values, which it is long enough for.
    pub(super) fn into_values<U: Pod>(self, len: usize) -> DeviceSliceMut<'a, U> {
        DeviceSliceMut::new(self.home, self.address, len)
    }

    pub(super) fn home(&self) -> &'a Home {
        self.home
    }

    pub(super) fn address(&self) -> u64 {
        self.address
    }
}

impl<T> fmt::Debug for DeviceSlice<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} values at {:#x} on {:?}", self.len, self.address, self.home.given())
    }
}

impl<T> fmt::Debug for DeviceSliceMut<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} values at {:#x} on {:?}", self.len, self.address, self.home.given())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_ranges() {
        assert_eq!(part(5, ..).unwrap(), (0, 5));
        assert_eq!(part(5, 2..).unwrap(), (2, 3));
        assert_eq!(part(5, ..=4).unwrap(), (0, 5));
        assert_eq!(part(5, 5..5).unwrap(), (5, 0));
        assert_eq!(part(0, ..).unwrap(), (0, 0));
        let outside = [(0, 6), (6, 6), (usize::MAX, usize::MAX)];
        for (first, end) in outside {
            assert!(part(5, first..end).is_err(), "{first}..{end}");
        }
        assert!(part(5, ..=5).is_err());
        assert!(part(5, ..=usize::MAX).is_err());
        assert_eq!(part(usize::MAX, ..usize::MAX).unwrap(), (0, usize::MAX));
        assert!(part(usize::MAX, usize::MAX..=usize::MAX).is_err());
        assert!(part(5, (Bound::Excluded(usize::MAX), Bound::Unbounded)).is_err());
        #[allow(clippy::reversed_empty_ranges, reason = "what a caller may give")]
        let reversed = part(5, 3..2);
        assert!(reversed.is_err());
    }
}
