//! Uses of allocations on further streams than those that free them.
//!
//! ```text
//! allocated, noted ──free──▶ kept ──every lane has passed──▶ nobody's
//! ```
//!
//! A block is kept with an epoch of each lane that it was noted for, and of the one that freed it; whoever
//! lacks memory asks about these. No stream is made to wait for it on the GPU.

#![forbid(unsafe_code)]

use smallvec::SmallVec;

use super::blocks::ByAddress;
use super::lanes::{Lanes, Named};
use crate::error::Result;

/// Lanes whose streams have ended that are asked about for one that an allocation is noted for: twice as many as come.
const ASKED_FOR_ONE: usize = 2;

/// A lane and one of its epochs.
type Need = (u32, u64);

/// A freed block that further streams may still be using.
#[derive(Debug)]
struct Kept<B> {
    block: B,
    needs: SmallVec<[Need; 3]>,
}

/// The uses of one pool's allocations.
#[derive(Debug)]
pub(super) struct Uses<B> {
    /// By the allocation's address: lanes, and what they were named by.
    noted: ByAddress<SmallVec<[(u32, Named); 2]>>,
    kept: Vec<Kept<B>>,
    /// For each lane, how often it is named above.
    pins: Vec<u32>,
}

impl<B: Copy> Uses<B> {
    pub(super) fn new() -> Self {
        Self { noted: ByAddress::default(), kept: Vec::new(), pins: Vec::new() }
    }

    /// Whether a lane is named, and must stay its stream's.
    pub(super) fn names(&self, lane: u32) -> bool {
        self.pins.get(lane as usize).is_some_and(|pins| *pins > 0)
    }

    fn pin(&mut self, lane: u32) {
        let lane = lane as usize;
        if lane >= self.pins.len() {
            self.pins.resize(lane + 1, 0);
        }
        self.pins[lane] += 1;
    }

    /// Lanes that an allocation is noted for whose streams have ended with work to do, a few of them, where another
    /// lane comes: it may outlive a great many streams, as weights outlive requests.
    pub(super) fn gone(
        &self,
        address: u64,
        lanes: &Lanes,
        comes: u32,
    ) -> SmallVec<[u32; ASKED_FOR_ONE]> {
        let noted = self.noted.get(&address);
        let uses = noted.filter(|uses| uses.iter().all(|(lane, _)| *lane != comes));
        let named = uses.into_iter().flatten().map(|(lane, _)| *lane);
        let gone = named.filter(|lane| lanes.has_ended(*lane) && !lanes.is_over(*lane));
        gone.take(ASKED_FOR_ONE).collect()
    }

    /// Notes that a lane's stream uses what is allocated at an address; streams that are over do so no more.
    pub(super) fn note(&mut self, address: u64, lanes: &Lanes, lane: u32, named: Named) {
        let uses = self.noted.entry(address).or_default();
        match uses.iter_mut().find(|(known, _)| *known == lane) {
            // The handle that came last is the one that is alive.
            Some((_, known)) => *known = named,
            None => {
                uses.retain(|(known, _)| {
                    let is_over = lanes.is_over(*known);
                    self.pins[*known as usize] -= u32::from(is_over);
                    !is_over
                });
                uses.push((lane, named));
                self.pin(lane);
            }
        }
    }

    /// Whether an allocation was noted.
    #[inline]
    pub(super) fn is_noted(&self, address: u64) -> bool {
        !self.noted.is_empty() && self.noted.contains_key(&address)
    }

    /// Keeps a noted allocation that a lane frees: its stream, and all that were noted, have to come past
    /// this. If an event cannot be recorded nothing has changed.
    pub(super) fn keep(
        &mut self,
        address: u64,
        block: B,
        lanes: &mut Lanes,
        (lane, named): (u32, Named),
    ) -> Result<()> {
        let uses = self.noted.get(&address).cloned().unwrap_or_default();
        let mut needs: SmallVec<[Need; 3]> = SmallVec::new();
        for (of, by) in &uses {
            needs.push((*of, lanes.used_until(*of, *by)?));
        }
        needs.push((lane, lanes.freed(lane, named)?));
        self.noted.remove(&address);
        // Each is named by the block now.
        self.pin(lane);
        self.kept.push(Kept { block, needs });
        Ok(())
    }

    /// Takes out what nobody can be using any more: `free` makes it nobody's.
    pub(super) fn settle(&mut self, lanes: &Lanes, mut free: impl FnMut(B)) {
        let mut at = 0;
        while let Some(kept) = self.kept.get(at) {
            if !kept.needs.iter().all(|(lane, epoch)| *epoch <= lanes.passed(*lane)) {
                at += 1;
                continue;
            }
            let kept = self.kept.swap_remove(at);
            kept.needs.iter().for_each(|(lane, _)| self.pins[*lane as usize] -= 1);
            free(kept.block);
        }
    }

    /// Lanes that kept blocks have to be asked about.
    pub(super) fn awaited(&self) -> Vec<u32> {
        let needs = self.kept.iter().flat_map(|kept| &kept.needs);
        let mut lanes: Vec<u32> = needs.map(|(lane, _)| *lane).collect();
        lanes.sort_unstable();
        lanes.dedup();
        lanes
    }
}
