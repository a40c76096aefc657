//! Settings of a simulator.

use std::time::Duration;

use crate::Simulator;
use crate::costs::Costs;

/// When enqueued work runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Schedule {
    /// As soon as its dependencies allow, at the latest when it is enqueued.
    #[default]
    Eager,
    /// Adversarially late: only when the host waits for it, or when the host has been told
    /// more than `patience` times that something is not ready. A host that polls memory which
    /// device work is to write, and calls nothing, waits for ever.
    Late {
        /// How many polls answer "not ready" before the work that is polled for runs.
        patience: u32,
    },
    /// At each driver call a seeded choice of streams advances by a seeded number of items.
    Random,
    /// Only the `advance` methods and synchronising calls run work.
    Manual,
}

/// Why a simulator could not be built.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum SimError {
    /// Every slot of this process has a live simulator.
    #[error("all {slots} simulators that a process can have at a time are in use")]
    NoSlot {
        /// How many there can be.
        slots: usize,
    },
    /// More devices than the simulator can tell apart.
    #[error("{asked} devices asked for, {most} is the most")]
    TooManyDevices {
        /// How many were asked for.
        asked: usize,
        /// The most there can be.
        most: usize,
    },
}

/// Settings of a simulator to be; see [`Simulator::builder`].
#[derive(Clone, Debug)]
#[must_use]
pub struct Builder {
    pub(crate) devices: usize,
    pub(crate) memory_bytes: u64,
    pub(crate) host_memory_bytes: u64,
    pub(crate) peer_access: bool,
    pub(crate) gpu_direct_rdma: bool,
    pub(crate) fabric: bool,
    pub(crate) seed: u64,
    pub(crate) schedule: Schedule,
    pub(crate) detect_races: bool,
    pub(crate) costs: Costs,
    pub(crate) deadlock_after: Duration,
}

impl Default for Builder {
    fn default() -> Self {
        Self {
            devices: 1,
            memory_bytes: 141 << 30,
            host_memory_bytes: 1 << 40,
            peer_access: true,
            gpu_direct_rdma: true,
            fabric: false,
            seed: 0,
            schedule: Schedule::Eager,
            detect_races: true,
            costs: Costs::h200(),
            deadlock_after: Duration::from_secs(10),
        }
    }
}

impl Builder {
    /// The number of simulated devices; default 1. With 0, `cuInit` finds no device.
    pub fn devices(mut self, count: usize) -> Self {
        self.devices = count;
        self
    }

    /// Physical memory of each device in bytes; default 141 GiB, that of an H200.
    pub fn memory_bytes(mut self, bytes: u64) -> Self {
        self.memory_bytes = bytes;
        self
    }

    /// Physical memory of the host for handles and memory pools there, in bytes; default 1 TiB. With
    /// 0 the devices do not support it.
    pub fn host_memory_bytes(mut self, bytes: u64) -> Self {
        self.host_memory_bytes = bytes;
        self
    }

    /// Whether the devices can reach each other's memory; default true.
    pub fn peer_access(mut self, on: bool) -> Self {
        self.peer_access = on;
        self
    }

    /// Whether network cards may be let reach the devices' memory (GPUDirect RDMA); they may at first.
    pub fn gpu_direct_rdma(mut self, on: bool) -> Self {
        self.gpu_direct_rdma = on;
        self
    }

    /// Whether the devices have fabric handles, which name memory on this host; default false.
    pub fn fabric(mut self, on: bool) -> Self {
        self.fabric = on;
        self
    }

    /// Seeds the scheduler: the same seed and the same calls give the same run.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// When enqueued work runs; default [`Schedule::Eager`].
    pub fn schedule(mut self, schedule: Schedule) -> Self {
        self.schedule = schedule;
        self
    }

    /// Whether the race detector watches; default true.
    pub fn detect_races(mut self, on: bool) -> Self {
        self.detect_races = on;
        self
    }

    /// What calls cost in modelled time; default [`Costs::h200`].
    pub fn costs(mut self, costs: Costs) -> Self {
        self.costs = costs;
        self
    }

    /// How long a synchronising call waits for work that only another thread can let run
    /// before it reports a deadlock; default 10 s.
    pub fn deadlock_after(mut self, time: Duration) -> Self {
        self.deadlock_after = time;
        self
    }

    /// Builds it.
    ///
    /// # Errors
    /// If too many simulators are alive in this process, or too many devices are asked for.
    pub fn build(self) -> Result<Simulator, SimError> {
        Simulator::new(self)
    }
}
