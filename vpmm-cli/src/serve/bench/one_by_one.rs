//! Mappings that are made one by one, beside what the driver's own calls take at that time.
//!
//! A machine is now slower and now quicker, by half as much again within seconds. So the driver's calls
//! are timed in turns with the mappings, and each case has its own floor.

use std::time::{Duration, Instant};

use gms::client::{AllocationInfo, MappingFloor, MemoryManager};
use gms::lock::Requested;
use serde_json::json;

use super::{Bench, MIB, ordinal, spread, us};
use crate::exit::Abort;

const BYTES: u64 = 2 * MIB;
const TAG: &str = "bench";

/// What a writer does with a mapping before it makes the next, as long as 2 MiB take to be copied there
/// from memory that is not page-locked.
const FILL: Duration = Duration::from_micros(200);

/// Mappings that are made between two timings of the driver.
const TURN: usize = 50;

/// The times of something, and of its parts.
#[derive(Default)]
struct Times {
    all: Vec<Duration>,
    /// The message, with what the server does for it.
    ask: Vec<Duration>,
    /// What is done here with its answer.
    map: Vec<Duration>,
}

impl Times {
    /// Times a mapping in its two parts: it is asked for, and mapped.
    fn step<T>(
        &mut self,
        manager: &mut MemoryManager,
        ask: impl FnOnce(&mut MemoryManager) -> Result<T, Abort>,
        map: impl FnOnce(&mut MemoryManager, T) -> Result<(), Abort>,
    ) -> Result<(), Abort> {
        let started = Instant::now();
        let answer = ask(manager)?;
        let asked = Instant::now();
        map(manager, answer)?;
        self.ask.push(asked - started);
        self.map.push(asked.elapsed());
        Ok(())
    }
}

fn map(
    manager: &mut MemoryManager,
    (about, file): (AllocationInfo, std::os::fd::OwnedFd),
) -> Result<(), Abort> {
    let address = manager.reserve(about.aligned_size).map_err(Abort::failure)?;
    manager.map(address, file, about).map_err(Abort::failure)
}

impl Bench<'_> {
    /// A writer makes mappings, without and with something to do in between, and a reader maps them.
    pub(super) fn create_one_by_one(&mut self) -> Result<(), Abort> {
        let count = self.count(500, 3);
        let mut writer = self.manager(Requested::Rw)?;
        let (mut times, mut floors) = (Times::default(), Vec::new());
        for turn in in_turns(count) {
            for _ in 0..turn {
                let started = Instant::now();
                writer.create_mapping(BYTES, TAG).map_err(Abort::failure)?;
                times.all.push(started.elapsed());
            }
            for _ in 0..turn {
                let ask = |manager: &mut MemoryManager| {
                    let session = manager.session().map_err(Abort::failure)?;
                    session.allocate_and_export(BYTES, TAG).map_err(Abort::failure)
                };
                times.step(&mut writer, ask, map)?;
            }
            let floor = MappingFloor::writer(&self.driver, ordinal(self.args.device), BYTES, turn);
            floors.push(floor.map_err(Abort::failure)?);
        }
        let writers = MappingFloor::middle(&floors);
        self.say_one_by_one("writer_create_mapping", times, writers.total())?;
        let mut filled = Vec::with_capacity(count);
        for _ in 0..count {
            let started = Instant::now();
            writer.create_mapping(BYTES, TAG).map_err(Abort::failure)?;
            filled.push(started.elapsed());
            let started = Instant::now();
            while started.elapsed() < FILL {
                std::hint::spin_loop();
            }
        }
        writer.commit().map_err(Abort::failure)?;
        let (p50, p99) = spread(filled);
        self.say(json!({"case": "writer_create_and_fill", "us_p50": p50, "us_p99": p99}))?;

        let mut reader = self.manager(Requested::Ro)?;
        let handles = reader.list_handles(None).map_err(Abort::failure)?;
        let mut handles = handles.into_iter();
        let (mut times, mut floors) = (Times::default(), Vec::new());
        for turn in in_turns(count) {
            for handle in handles.by_ref().take(turn) {
                let started = Instant::now();
                reader.import_mapping(&handle.allocation_id).map_err(Abort::failure)?;
                times.all.push(started.elapsed());
            }
            for handle in handles.by_ref().take(turn) {
                let ask = |manager: &mut MemoryManager| {
                    let session = manager.session().map_err(Abort::failure)?;
                    session.export(&handle.allocation_id).map_err(Abort::failure)
                };
                times.step(&mut reader, ask, map)?;
            }
            floors.push(self.reader_floor(&mut reader, turn)?);
        }
        reader.close().map_err(Abort::failure)?;
        let readers = MappingFloor::middle(&floors);
        self.say_one_by_one("reader_create_mapping", times, readers.total())?;
        self.say(json!({
            "case": "driver_floor",
            "create_us": us(writers.create),
            "export_us": us(writers.export),
            "writer_import_and_map_us": us(writers.import_and_map),
            "writer_set_access_us": us(writers.set_access),
            "writer_us": us(writers.total()),
            "reader_import_and_map_us": us(readers.import_and_map),
            "reader_set_access_us": us(readers.set_access),
            "reader_us": us(readers.total()),
        }))
    }

    /// The driver's own calls for the memory of the last mappings.
    fn reader_floor(
        &self,
        manager: &mut MemoryManager,
        count: usize,
    ) -> Result<MappingFloor, Abort> {
        let known = manager.mappings();
        let mut files = Vec::with_capacity(count);
        for mapping in known.iter().rev().take(count) {
            files.push(manager.export_handle(&mapping.allocation_id).map_err(Abort::failure)?);
        }
        let ordinal = ordinal(self.args.device);
        MappingFloor::reader(&self.driver, ordinal, BYTES, &files).map_err(Abort::failure)
    }

    fn say_one_by_one(&mut self, case: &str, times: Times, driver: Duration) -> Result<(), Abort> {
        let (p50, p99) = spread(times.all);
        self.say(json!({
            "case": case,
            "us_p50": p50,
            "us_p99": p99,
            "ask_us": spread(times.ask).0,
            "map_us": spread(times.map).0,
            "driver_us": us(driver),
        }))
    }
}

/// A number in parts of [`TURN`] at most.
fn in_turns(count: usize) -> impl Iterator<Item = usize> {
    (0..count).step_by(TURN).map(move |done| TURN.min(count - done))
}
