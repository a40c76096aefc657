//! Faults on demand.

use cuda_sys::types::CUresult;
use rustc_hash::FxHashMap;

/// Which coming calls fail, and how.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    /// By function: how many calls until each failure.
    by_name: FxHashMap<String, Vec<(u64, CUresult)>>,
    /// By the number of the call since the simulator began.
    by_number: FxHashMap<u64, CUresult>,
    /// Every call after that number.
    from: Option<(u64, CUresult)>,
}

impl Faults {
    pub(crate) fn fail_nth(&mut self, name: &str, n: u64, code: CUresult) {
        self.by_name.entry(name.to_owned()).or_default().push((n.max(1), code));
    }

    pub(crate) fn fail_number(&mut self, number: u64, code: CUresult) {
        self.by_number.insert(number, code);
    }

    pub(crate) fn fail_after(&mut self, number: u64, code: CUresult) {
        self.from = Some((number, code));
    }

    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }

    /// The code that this call fails with, if it is one that was asked to fail.
    pub(crate) fn strike(&mut self, name: &str, number: u64) -> Option<CUresult> {
        let mut struck = None;
        if !self.by_name.is_empty()
            && let Some(faults) = self.by_name.get_mut(name)
        {
            for fault in faults.iter_mut() {
                fault.0 -= 1;
                if fault.0 == 0 {
                    struck = Some(fault.1);
                }
            }
            faults.retain(|fault| fault.0 > 0);
            if faults.is_empty() {
                self.by_name.remove(name);
            }
        }
        let numbered = self.by_number.remove(&number);
        let late = self.from.filter(|(after, _)| number > *after).map(|(_, code)| code);
        struck.or(numbered).or(late)
    }
}
