//! Streams that come and go.

use super::*;

impl<'a> World<'a> {
    pub(super) fn replace(&mut self, thread: usize) {
        let shared = self.shared(thread);
        let Some(lane) = self.pick(&shared) else { return };
        if self.lanes[lane].must_live || matches!(self.lanes[lane].of, Of::Legacy) {
            return;
        }
        let others: Vec<usize> = shared.iter().copied().filter(|other| *other != lane).collect();
        let Some(heir) = self.pick(&others) else { return };
        note!(self, "replace lane {lane}, heir {heir}");
        self.leave(thread, lane, heir);
        let rig = self.rig;
        let raw = !self.one_in(2);
        let former = std::mem::replace(&mut self.lanes[lane].of, Of::Legacy);
        match former {
            Of::Owned(stream) => {
                let fault = self.faulty && self.one_in(6);
                if fault {
                    self.had_faults = true;
                    let n = 1 + self.random.below(4);
                    note!(self, "  fault at {n} of the end");
                    self.sim.fail_call(n, FAULT);
                }
                drop(stream);
                self.sim.clear_faults();
            }
            Of::Raw(raw) => {
                call!(rig.driver, cuCtxSetCurrent(rig.device.context()));
                call!(rig.driver, cuStreamDestroy_v2(raw as CUstream));
            }
            _ => unreachable!(),
        }
        note!(self, "  raw {raw}");
        self.lanes[lane].of = if raw { self.raw() } else { Of::Owned(rig.stream()) };
        reach("streams replaced");
    }

    pub(super) fn raw(&mut self) -> Of {
        let (raw, _) = crate::support::streams::make(self.rig, u32::from(!self.one_in(4)));
        Of::Raw(raw as usize)
    }

    /// What is a lane's becomes another's, before it ends.
    pub(super) fn leave(&mut self, thread: usize, lane: usize, heir: usize) {
        self.order(lane, heir);
        let is_owned = matches!(self.lanes[lane].of, Of::Owned(_));
        for at in (0..self.live.len()).rev() {
            if self.live[at].of == lane {
                self.live[at].of = heir;
            }
            if self.live[at].uses.contains(&lane) {
                if is_owned {
                    self.live[at].uses.remove(&lane);
                } else if self.reachable(thread).contains(&at) {
                    self.free_on(at, heir);
                } else {
                    panic!("used by {lane}, and nobody can free it");
                }
            }
        }
        for gp in &mut self.gps {
            if gp.before.remove(&lane) {
                gp.before.insert(heir);
            }
        }
    }

    pub(super) fn can_leave(&self, thread: usize, lane: usize) -> bool {
        let reachable = self.reachable(thread);
        let owned = matches!(self.lanes[lane].of, Of::Owned(_));
        self.live
            .iter()
            .enumerate()
            .all(|(at, live)| !live.uses.contains(&lane) || owned || reachable.contains(&at))
    }

    // ---- graphs
}
