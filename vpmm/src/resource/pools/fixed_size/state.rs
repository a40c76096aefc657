//! What each stream has free, behind the fronts.

#![forbid(unsafe_code)]

use std::cmp::Reverse;
use std::collections::VecDeque;

use smallvec::SmallVec;

use super::Core;
use super::chunks::BlockId;
use super::front::{BATCH, Front};
use crate::device::StreamHandle;
use crate::error::Result;
use crate::resource::pools::blocks::NOBODY;
use crate::resource::pools::lanes::{Lanes, Named};
use crate::resource::pools::uses::Uses;

/// Blocks that other streams must have before they are asked about, at most; and their bytes.
const MOST_WANTED: u64 = 32;
const MOST_WANTED_BYTES: u64 = 128 << 20;

/// After so many questions that found something others must have twice as much.
const ASKS: u32 = 4;

/// Blocks that other streams have: how many, in which lane, with that one's front.
pub(super) struct Others<'a>(Vec<(u64, u32, Option<&'a Front>)>);

pub(super) struct State {
    pub(super) lanes: Lanes,
    uses: Uses<BlockId>,
    /// What each lane has freed, the latest last, each with its epoch. The first lane is nobody's.
    free: Vec<VecDeque<(BlockId, u64)>>,
    /// Blocks that other streams must have before they are asked about, and not more is made.
    wanted: u64,
    most_wanted: u64,
    /// Questions that found something, since `wanted` changed or more was made.
    asks: u32,
}

impl State {
    pub(super) fn new(lanes: Lanes, block_bytes: u64) -> Self {
        let most_wanted = (MOST_WANTED_BYTES / block_bytes).clamp(1, MOST_WANTED);
        Self {
            lanes,
            uses: Uses::new(),
            free: vec![VecDeque::new()],
            wanted: 1,
            most_wanted,
            asks: 0,
        }
    }

    /// The lane of a stream.
    pub(super) fn lane(&mut self, named: Named) -> Result<u32> {
        let (free, uses) = (&self.free, &self.uses);
        let is_empty =
            |lane: u32| free.get(lane as usize).is_none_or(VecDeque::is_empty) && !uses.names(lane);
        let lane = self.lanes.lane(named, is_empty)?;
        if lane as usize >= self.free.len() {
            self.free.resize_with(lane as usize + 1, VecDeque::new);
        }
        Ok(lane)
    }

    fn has_free(&self, lane: u32) -> bool {
        self.free.get(lane as usize).is_some_and(|free| !free.is_empty())
    }

    /// A block that a lane's stream may have at once. More of its own go to its front on the way.
    pub(super) fn hit(&mut self, lane: u32, front: Option<&Front>) -> Option<BlockId> {
        let own = &mut self.free[lane as usize];
        let Some((block, _)) = own.pop_back() else {
            return self.free[NOBODY as usize].pop_back().map(|(block, _)| block);
        };
        if let Some(front) = front {
            let from = own.len().saturating_sub(BATCH);
            let rest = front.fill(own.drain(from..).map(|(block, _)| block));
            if !rest.is_empty() {
                self.add(lane, rest);
            }
        }
        Some(block)
    }

    /// What a stream that is known by its handle has freed.
    pub(super) fn add(&mut self, lane: u32, blocks: impl IntoIterator<Item = BlockId>) {
        let epoch = self.lanes.freed_on_known(lane);
        self.add_at(lane, epoch, blocks);
    }

    /// Puts blocks into a lane, with an epoch that is not before those there.
    pub(super) fn add_at(
        &mut self,
        lane: u32,
        epoch: u64,
        blocks: impl IntoIterator<Item = BlockId>,
    ) {
        self.free[lane as usize].extend(blocks.into_iter().map(|block| (block, epoch)));
    }

    /// As [`Lanes::put_lost`].
    pub(super) fn put_lost(&mut self) -> (u32, u64) {
        let (lane, epoch) = self.lanes.put_lost();
        self.free.resize_with(lane as usize + 1, VecDeque::new);
        (lane, epoch)
    }

    /// What is in a front is its lane's.
    pub(super) fn settle(&mut self, front: &Front) {
        let (lane, blocks) = front.drain();
        if !blocks.is_empty() {
            self.add(lane, blocks);
        }
    }

    /// A front is nobody's from here on, and what is in it its lane's.
    pub(super) fn end(&mut self, front: &Front) {
        let (lane, blocks) = front.end();
        if !blocks.is_empty() {
            self.add(lane, blocks);
        }
    }

    /// What is in any front is its lane's.
    pub(super) fn settle_all(&mut self, core: &Core) {
        core.fronts.all().into_iter().for_each(|(_, front)| self.settle(front));
    }

    /// What a lane has up to an epoch becomes nobody's.
    pub(super) fn pass(&mut self, lane: u32, epoch: u64) {
        // Epochs grow, and so what has passed is at the front.
        let Some(free) = self.free.get_mut(lane as usize) else { return };
        let passed = free.partition_point(|(_, of)| *of <= epoch);
        let rest = free.split_off(passed);
        let mut passed = std::mem::replace(free, rest);
        self.free[NOBODY as usize].append(&mut passed);
    }

    /// Other streams with something free, and how much that is: whoever has most comes first.
    pub(super) fn others<'a>(&self, core: &'a Core, lane: u32) -> Others<'a> {
        let count = |of: u32| self.free.get(of as usize).map_or(0, |free| free.len() as u64);
        let mut others: Vec<_> = self.lanes.all().map(|of| (count(of), of, None)).collect();
        for (_, front) in core.fronts.all() {
            let (of, count) = front.look();
            // Lanes count from 1; a front that was given up has none.
            if let Some(other) = others.get_mut((of as usize).wrapping_sub(1)) {
                *other = (other.0 + count as u64, of, Some(front));
            }
        }
        others.retain(|(count, of, _)| *of != lane && *count > 0);
        others.sort_unstable_by_key(|(count, of, _)| (Reverse(*count), *of));
        Others(others)
    }

    /// Whether others have so much that it is worth asking about: a question costs some driver calls, and
    /// streams that ask each other for little take what the other needs again at once.
    pub(super) fn is_worth_asking(&self, others: &Others<'_>) -> bool {
        others.0.iter().map(|(count, ..)| *count).sum::<u64>() >= self.wanted
    }

    /// Asks other streams for what they have freed. What is complete becomes nobody's; what is not is
    /// waited for on the GPU.
    pub(super) fn ask(
        &mut self,
        others: &Others<'_>,
        lane: u32,
        named: Named,
    ) -> Result<Option<BlockId>> {
        self.poll(others)?;
        match self.hit(lane, None) {
            Some(block) => Ok(Some(block)),
            None => self.take_over(lane, named),
        }
    }

    /// Others were asked, and had something.
    pub(super) fn note_ask(&mut self) {
        self.asks += 1;
        if self.asks == ASKS {
            self.asks = 0;
            self.wanted = (2 * self.wanted).min(self.most_wanted);
        }
    }

    /// More was made.
    pub(super) fn note_growth(&mut self) {
        self.asks = 0;
    }

    /// Asks other streams how far they have come, until one has finished with something: that is
    /// everybody's then.
    fn poll(&mut self, others: &Others<'_>) -> Result<()> {
        for (_, lane, front) in &others.0 {
            if let Some(front) = front {
                self.settle(front);
            }
            if self.has_free(*lane)
                && let Some(epoch) = self.lanes.poll(*lane)?
            {
                self.pass(*lane, epoch);
                if self.has_free(NOBODY) {
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// Blocks that other streams freed, which this one is made to wait for: those that were freed first.
    fn take_over(&mut self, lane: u32, named: Named) -> Result<Option<BlockId>> {
        let others = self.lanes.all().filter(|other| *other != lane);
        let mut offers: Vec<(u64, u32)> = others
            .filter_map(|other| Some((self.free.get(other as usize)?.front()?.1, other)))
            .collect();
        offers.sort_unstable();
        for (_, other) in offers {
            // One wait for half of what there is; the rest stays the other stream's.
            let free = &self.free[other as usize];
            let half = free.len().div_ceil(2).min(BATCH);
            let Some((_, epoch)) = free.get(half - 1).copied() else { continue };
            if self.lanes.come_after(lane, named, other, epoch)? {
                return Ok(self.move_over(lane, named, other));
            }
        }
        Ok(None)
    }

    /// The same of streams that this one has waited for already.
    pub(super) fn take_waited_for(&mut self, lane: u32, named: Named) -> Option<BlockId> {
        let is_after = |other: &u32| {
            let first = self.free.get(*other as usize).and_then(VecDeque::front);
            first.is_some_and(|(_, epoch)| self.lanes.is_after(lane, *other, *epoch))
        };
        let other = self.lanes.all().filter(|other| *other != lane).find(is_after)?;
        self.move_over(lane, named, other)
    }

    /// Gives a lane half of what it has waited for of another: one block at once.
    fn move_over(&mut self, lane: u32, named: Named, other: u32) -> Option<BlockId> {
        let free = &mut self.free[other as usize];
        let lanes = &self.lanes;
        let waited_for = free.partition_point(|(_, epoch)| lanes.is_after(lane, other, *epoch));
        let mut taken = free.drain(..waited_for.div_ceil(2).min(BATCH)).map(|(block, _)| block);
        let first = taken.next()?;
        let rest: SmallVec<[BlockId; BATCH]> = taken.collect();
        if !rest.is_empty() {
            let epoch = self.lanes.put(lane, named);
            self.add_at(lane, epoch, rest);
        }
        Some(first)
    }

    /// A stream is about to end, and has nothing in a front.
    pub(super) fn stream_ends(&mut self, stream: StreamHandle) {
        self.lanes.stream_ends(stream, |lane| self.uses.names(lane));
    }

    /// A stream uses what is allocated at an address.
    pub(super) fn note(&mut self, address: u64, lane: u32, named: Named) {
        for gone in self.uses.gone(address, &self.lanes, lane) {
            // What fails is as it was, and met by whoever asks next.
            if let Ok(Some(epoch)) = self.lanes.poll(gone) {
                self.pass(gone, epoch);
            }
        }
        self.uses.note(address, &self.lanes, lane, named);
    }

    /// Keeps a block that was freed until those who use it have come past the free.
    pub(super) fn keep(&mut self, named: Named, address: u64, block: BlockId) -> Result<()> {
        let lane = self.lane(named)?;
        self.uses.keep(address, block, &mut self.lanes, (lane, named))
    }

    /// What nobody can be using any more is nobody's.
    pub(super) fn settle_uses(&mut self) {
        let nobodys = &mut self.free[NOBODY as usize];
        self.uses.settle(&self.lanes, |block| nobodys.push_back((block, 0)));
    }

    /// Asks about kept blocks, if there are any.
    pub(super) fn ask_uses(&mut self, lane: u32) -> Result<Option<BlockId>> {
        let awaited = self.uses.awaited();
        if awaited.is_empty() {
            return Ok(None);
        }
        for of in awaited {
            if let Some(epoch) = self.lanes.poll(of)? {
                self.pass(of, epoch);
            }
        }
        self.settle_uses();
        Ok(self.hit(lane, None))
    }

    /// What a wait for the device would prove free, if there is memory that nothing else does.
    pub(super) fn lost(&mut self) -> Option<Vec<(u32, u64)>> {
        let lost =
            |lane: u32| self.lanes.is_lost(lane) && (self.has_free(lane) || self.uses.names(lane));
        self.lanes.all().any(lost).then(|| self.lanes.pending())
    }

    /// The host has waited for the device: what was pending before is nobody's.
    pub(super) fn device_passed(&mut self, pending: &[(u32, u64)]) {
        self.lanes.device_passed(pending);
        for lane in self.lanes.all() {
            self.pass(lane, self.lanes.passed(lane));
        }
        self.settle_uses();
    }
}
