//! Who may use a free block without asking.

#![forbid(unsafe_code)]

/// Nobody in particular (its fence has passed), or one stream, in one of its two epochs.
///
/// A stream's frees go to its open epoch. Closing it records an event on the stream and opens the
/// other; what was open is closed then, until the event has passed and it belongs to nobody. So a
/// block's owner changes with its stream's epoch, and no block is looked at for that.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::default) struct Owner(u32);

impl Owner {
    /// Any stream may have it.
    pub(in crate::default) const NOBODY: Self = Self(0);

    /// A stream by its index, in its even or odd epochs.
    #[inline]
    pub(in crate::default) fn stream(index: u32, parity: usize) -> Self {
        Self(2 + 2 * index + parity as u32)
    }

    /// The stream and the parity of the epoch, unless it is nobody.
    #[inline]
    pub(in crate::default) fn of_stream(self) -> Option<(u32, usize)> {
        (self.0 >= 2).then(|| ((self.0 - 2) / 2, (self.0 % 2) as usize))
    }

    /// Whether this stream may use it now.
    #[inline]
    pub(super) fn is_usable_by(self, index: u32) -> bool {
        self == Self::NOBODY || self.0 / 2 == index + 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_may_use_its_own_and_what_is_nobodys() {
        assert!(Owner::NOBODY.is_usable_by(0) && Owner::NOBODY.of_stream().is_none());
        for parity in [0, 1] {
            let owner = Owner::stream(7, parity);
            assert_eq!(owner.of_stream(), Some((7, parity)));
            assert!(owner.is_usable_by(7) && !owner.is_usable_by(6) && !owner.is_usable_by(8));
        }
    }
}
