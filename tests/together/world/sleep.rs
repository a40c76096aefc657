//! Tags that sleep and wake.

use super::*;

impl<'a> World<'a> {
    pub(super) fn sleep(&mut self, thread: usize) {
        let (slot, tag) = (self.below(self.slots.len()), self.below(2));
        let id = self.slots[slot].id;
        let Some(lane) = self.lane(thread) else { return };
        let home = Home::Tag(tag);
        let of_tag: Vec<usize> = (0..self.live.len())
            .filter(|at| self.live[*at].pool == id && self.live[*at].home == home)
            .collect();
        let pool = self.slots[slot].pool.clone();
        let stream = self.lanes[lane].handle();
        if self.slots[slot].asleep[tag] {
            let empty = self.one_in(4);
            let result = self.attempt(&pool, true, || {
                if empty {
                    pool.resume_empty(TAGS[tag], stream)
                } else {
                    pool.resume(TAGS[tag], stream)
                }
            });
            note!(self, "resume {} {id} empty {empty} lane {lane}: {result:?}", TAGS[tag]);
            match result {
                Ok(_) => {
                    reach("wakes");
                    self.slots[slot].asleep[tag] = false;
                    let kept = self.slots[slot].kept[tag] && !empty;
                    for at in of_tag {
                        self.live[at].of = lane;
                        if !kept {
                            let live = &self.live[at];
                            self.rig.fill(live.ptr.address(), live.bytes, live.seed, stream);
                        }
                    }
                }
                Err(error) if error.is_out_of_memory() => reach("wakes refused"),
                // What could not be undone before waits for the context.
                Err(Error::StreamCapturing)
                    if self.lanes.iter().any(|lane| lane.part.is_some()) => {}
                Err(error) => panic!("{error}"),
            }
            return;
        }
        if pool.tagged(TAGS[tag]).is_err() {
            return;
        }
        // All work of the heap's allocations comes before.
        let reachable = self.reachable(thread);
        if of_tag.iter().any(|at| !reachable.contains(at)) {
            return;
        }
        for at in &of_tag {
            let live = &self.live[*at];
            if live.uses.iter().any(|used| !self.usable(thread).contains(used)) {
                return;
            }
        }
        for at in &of_tag {
            let live = &self.live[*at];
            self.order(live.of, lane);
            live.uses.iter().for_each(|used| self.order(*used, lane));
        }
        let contents = match self.below(4) {
            0 => Contents::Discard,
            1 => Contents::Keep(Buffers::Retain),
            _ => Contents::Keep(Buffers::Release),
        };
        let result = self.attempt(&pool, false, || pool.suspend(TAGS[tag], stream, &contents));
        note!(self, "suspend {} {id} {contents:?} lane {lane}: {result:?}", TAGS[tag]);
        let tagged = pool.tagged(TAGS[tag]).unwrap();
        match result {
            Ok(_) => {
                reach("sleeps");
                assert!(tagged.is_asleep());
            }
            Err(Error::Exported { .. }) => assert!(self.slots[slot].exported),
            Err(Error::StreamCapturing)
                if self.lanes.iter().any(|lane| lane.part.is_some() || lane.must_live) =>
            {
                reach("sleeps refused")
            }
            Err(Error::Asleep) if tagged.is_asleep() => {} // half, by a fault
            Err(Error::OutOfMemory { .. } | Error::Driver { .. }) if self.faulty => {}
            Err(error) => panic!("{error}"),
        }
        if tagged.is_asleep() {
            self.slots[slot].asleep[tag] = true;
            self.slots[slot].kept[tag] = contents != Contents::Discard;
        }
        for at in of_tag {
            self.live[at].of = lane;
        }
    }
}
