//! Saving and loading beside what they are made of.

use std::path::Path;
use std::time::{Duration, Instant};

use gms::lock::Requested;
use gms::storage::{StorageOptions, load, measure, save};
use serde_json::json;

use super::{Bench, MIB};
use crate::exit::Abort;
use crate::serve::thousandths;

/// Bytes of an allocation.
const EACH: u64 = 64 * MIB;

/// Gigabytes a second, to the megabyte.
fn rate(bytes: u64, time: Duration) -> f64 {
    thousandths(bytes as f64 / 1e9 / time.as_secs_f64().max(1e-9))
}

impl Bench<'_> {
    /// A layout is saved, and loaded into the server again. On the same machine, with the same chunks
    /// and workers, first: plain writes and reads of as many bytes, and plain copies.
    pub(super) fn disk(&mut self, folder: &Path) -> Result<(), Abort> {
        let name = |what: &str| folder.join(format!("gms-bench-{}-{what}", std::process::id()));
        let (each, total) =
            if self.args.quick { (2 * MIB, 6 * MIB) } else { (EACH, self.args.bytes.0) };
        let sizes = vec![each; total.div_ceil(each).max(1) as usize];
        let options = StorageOptions::default();
        let mut writer = self.manager(Requested::Rw)?;
        writer.create_mappings(&sizes, "bench").map_err(Abort::failure)?;
        let limits = measure(&mut writer, &name("limits"), &options).map_err(Abort::failure)?;
        writer.commit().map_err(Abort::failure)?;
        drop(writer);

        let mut reader = self.manager(Requested::Ro)?;
        let started = Instant::now();
        let stored = save(&mut reader, &name("saved"), &options, &|_| {});
        let saved = started.elapsed();
        drop(reader);
        let stored = stored.map_err(Abort::failure)?;
        let mut writer = self.manager(Requested::Rw)?;
        let started = Instant::now();
        let loaded = load(&mut writer, &name("saved"), &options, &|_| {});
        let took = started.elapsed();
        std::fs::remove_dir_all(name("saved")).map_err(Abort::failure)?;
        loaded.map_err(Abort::failure)?;
        let bytes = stored.bytes;
        for (case, time, disk, copy) in [
            ("save", saved, limits.disk_write, limits.copy_to_host),
            ("load", took, limits.disk_read, limits.copy_to_device),
        ] {
            self.say(json!({
                "case": case,
                "bytes": bytes,
                "ms": super::ms(time),
                "gb_per_s": rate(bytes, time),
                "disk_gb_per_s": rate(bytes, disk),
                "pinned_copy_gb_per_s": rate(bytes, copy),
                "of_the_slower": thousandths(disk.max(copy).as_secs_f64() / time.as_secs_f64().max(1e-9)),
            }))?;
        }
        Ok(())
    }
}
