//! The drawing of a pool's addresses, as the design draws them.

#![forbid(unsafe_code)]

use std::fmt;

use crate::region::State;

/// A piece of a [`Layout`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Piece {
    pub(crate) state: State,
    pub(crate) pages: u64,
    pub(crate) latest: bool,
    pub(crate) reservation: u32,
}

/// What stands where, in ascending order of addresses, in pages:
///
/// - `[4]` an allocation, `[+4]` the one made last
/// - `[-4]` free memory
/// - `[~4]` addresses whose memory has moved and that wait to be unmapped (zombies)
/// - `[*4]` a hole: addresses without memory
/// - `[?4]` pages that another thread is moving at this moment
///
/// The unused end of a reservation is left out; reservations are separated by ` | `.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Layout {
    pub(crate) pieces: Vec<Piece>,
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, piece) in self.pieces.iter().enumerate() {
            let next = self.pieces.get(i + 1);
            let last = next.is_none_or(|next| next.reservation != piece.reservation);
            let pages = piece.pages;
            match piece.state {
                State::Live if piece.latest => write!(f, "[+{pages}]")?,
                State::Live => write!(f, "[{pages}]")?,
                // Fences are not drawn: neighbours with different ones are still one free range.
                State::Idle | State::Pending => {
                    if !i.checked_sub(1).is_some_and(|j| self.joins_next(j)) {
                        write!(f, "[-{}]", self.free_run(i))?;
                    }
                }
                State::Zombie => write!(f, "[~{pages}]")?,
                State::Hole if last => {}
                State::Hole => write!(f, "[*{pages}]")?,
                State::Transit => write!(f, "[?{pages}]")?,
            }
            if last && next.is_some() {
                write!(f, " | ")?;
            }
        }
        Ok(())
    }
}

impl Layout {
    fn is_free(piece: &Piece) -> bool {
        matches!(piece.state, State::Idle | State::Pending)
    }

    /// Whether a free piece and the next are drawn as one.
    fn joins_next(&self, i: usize) -> bool {
        let (Some(piece), Some(next)) = (self.pieces.get(i), self.pieces.get(i + 1)) else {
            return false;
        };
        Self::is_free(piece) && Self::is_free(next) && piece.reservation == next.reservation
    }

    fn free_run(&self, first: usize) -> u64 {
        let mut last = first;
        while self.joins_next(last) {
            last += 1;
        }
        self.pieces[first..=last].iter().map(|piece| piece.pages).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drawn(pieces: &[(State, u64, bool, u32)]) -> String {
        let piece =
            |&(state, pages, latest, reservation)| Piece { state, pages, latest, reservation };
        Layout { pieces: pieces.iter().map(piece).collect() }.to_string()
    }

    #[test]
    fn every_state_has_its_sign() {
        let pieces = [
            (State::Hole, 10, false, 0),
            (State::Live, 1, false, 0),
            (State::Zombie, 2, false, 0),
            (State::Live, 11, true, 0),
            (State::Idle, 1, false, 0),
            (State::Pending, 2, false, 0),
            (State::Transit, 5, false, 0),
            (State::Hole, 99, false, 0),
        ];
        assert_eq!(drawn(&pieces), "[*10][1][~2][+11][-3][?5]");
    }

    #[test]
    fn reservations_stand_apart() {
        let pieces =
            [(State::Idle, 1, false, 0), (State::Idle, 2, false, 1), (State::Hole, 7, false, 1)];
        assert_eq!(drawn(&pieces), "[-1] | [-2]");
        assert_eq!(drawn(&[]), "");
    }
}
