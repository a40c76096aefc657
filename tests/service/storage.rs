//! Layouts in files: saved, loaded into an empty server, and refused where a byte is missing or wrong.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use gms::client::ConnectOptions;
use gms::lock::Requested;
use gms::storage::{StorageError, StorageOptions, Stored, check, load, save};
use rustix::fs::CWD;
use serde_json::Value;

use crate::random::Lcg;
use crate::rig::{Folder, GRANULE, Local, Machine, PATIENCE, pattern};
use crate::roles::Process;

fn options() -> StorageOptions {
    let mut options = StorageOptions::default();
    options.shard_bytes = 5 * GRANULE;
    options.chunk_bytes = GRANULE;
    options.workers = 3;
    options
}

const SIZES: [u64; 4] = [GRANULE, 3 * GRANULE - 5, 2 * GRANULE, 7 * GRANULE];

/// A server with a layout whose every granule is filled, saved in `folder`.
fn saved(folder: &Path) -> (Stored, Local) {
    let local = Local::start();
    let machine = Machine::new();
    let mut writer = machine.connected(local.socket(), Requested::Rw);
    let session = writer.session().unwrap();
    for (n, size) in SIZES.into_iter().enumerate() {
        let tag = if n == 3 { "kv_cache" } else { "weights" };
        let made = session.allocate(size, tag).unwrap();
        session.metadata_put(&format!("é.{n}"), &made.allocation_id, n as u64, b"\0v\xff").unwrap();
    }
    for (made, at) in writer.import_all(None).unwrap() {
        for granule in 0..made.aligned_size / GRANULE {
            let bytes = pattern(made.layout_slot * 100 + granule, GRANULE as usize);
            machine.write(at + granule * GRANULE, &bytes);
        }
    }
    writer.commit().unwrap();
    let mut reader = machine.connected(local.socket(), Requested::Ro);
    let done = AtomicU64::new(0);
    let stored = save(&mut reader, folder, &options(), &|bytes| {
        done.fetch_max(bytes, Ordering::Relaxed);
    });
    let stored = stored.unwrap();
    assert_eq!(done.load(Ordering::Relaxed), stored.bytes);
    reader.close().unwrap();
    machine.sim.assert_clean();
    (stored, local)
}

fn loaded(local: &Local, folder: &Path) -> Result<Stored, StorageError> {
    let machine = Machine::new();
    let mut writer = machine.connected(local.socket(), Requested::Rw);
    let stored = load(&mut writer, folder, &options(), &|_| {});
    assert!(!writer.is_connected());
    drop(writer);
    machine.sim.assert_clean();
    stored
}

#[test]
fn a_layout_comes_back_as_it_was() {
    let folder = Folder::new();
    let files = folder.path().join("device-0");
    let (stored, first) = saved(&files);
    assert_eq!((stored.allocations, stored.metadata, stored.bytes), (4, 4, 13 * GRANULE));
    assert!(!folder.path().join("device-0.partial").exists());

    let second = Local::start();
    assert_eq!(loaded(&second, &files).unwrap(), stored);
    let machine = Machine::new();
    let mut reader = machine.connected(second.socket(), Requested::Ro);
    assert_eq!(reader.layout_hash().unwrap(), stored.layout_hash);
    for (made, at) in reader.import_all(None).unwrap() {
        assert_eq!(made.size, SIZES[made.layout_slot as usize]);
        for granule in 0..made.aligned_size / GRANULE {
            let read = machine.read(at + granule * GRANULE, GRANULE as usize);
            assert!(read == pattern(made.layout_slot * 100 + granule, GRANULE as usize));
        }
        let key = format!("é.{}", made.layout_slot);
        let entry = reader.metadata_get(&key).unwrap().unwrap();
        assert_eq!(entry.allocation_id, made.allocation_id, "the name that it has now");
        assert_eq!((entry.offset_bytes, &*entry.value), (made.layout_slot, &b"\0v\xff"[..]));
    }
    reader.close().unwrap();

    // The first is as it was, too, and its folder is not overwritten.
    let mut reader = machine.connected(first.socket(), Requested::Ro);
    let again = save(&mut reader, &files, &options(), &|_| {});
    assert!(matches!(again, Err(StorageError::Exists { .. })), "{again:?}");
}

/// The files are the Python service's: these names, these fields and no others.
#[test]
fn the_files_are_those_that_python_reads() {
    let folder = Folder::new();
    let files = folder.path().join("device-0");
    saved(&files);
    let json = |name: &str| -> Value {
        serde_json::from_slice(&std::fs::read(files.join(name)).unwrap()).unwrap()
    };
    let manifest = json("manifest.json");
    assert!(manifest["timestamp"].as_f64().unwrap() > 1.7e9);
    assert_eq!(manifest["device"], 0);
    let allocations = manifest["allocations"].as_array().unwrap();
    let names: Vec<&str> =
        allocations.iter().map(|saved| saved["tensor_file"].as_str().unwrap()).collect();
    let expected = ["0000", "0000", "0001", "0002"].map(|n| format!("shards/shard_{n}.bin"));
    assert_eq!(names, expected);
    let mut fields: Vec<&String> = allocations[0].as_object().unwrap().keys().collect();
    fields.sort();
    let python = ["aligned_size", "allocation_id", "size", "tag", "tensor_file", "tensor_offset"];
    assert_eq!(fields, python);
    let entry = &json("gms_metadata.json")["é.1"];
    assert_eq!((&entry["offset_bytes"], &entry["value"]), (&1.into(), &"AHb/".into()));
    let shard = std::fs::read(files.join("shards/shard_0001.bin")).unwrap();
    assert!(shard[..GRANULE as usize] == pattern(200, GRANULE as usize));
}

/// Nothing is published of files that are not whole, and nothing is left of the attempt.
fn refused(files: &Path) -> StorageError {
    let local = Local::start();
    let error = loaded(&local, files).unwrap_err();
    local.await_state("EMPTY");
    local.await_memory(0);
    assert!(!local.events().contains(&("committed".to_owned(), 0)));
    error
}

#[test]
fn a_shard_that_was_cut_off_is_refused() {
    let folder = Folder::new();
    let files = folder.path().join("saved");
    saved(&files);
    let shard = files.join("shards/shard_0002.bin");
    let file = std::fs::File::options().write(true).open(&shard).unwrap();
    file.set_len(7 * GRANULE - 1).unwrap();
    let error = refused(&files);
    assert!(matches!(&error, StorageError::Damaged { path, .. } if *path == shard), "{error}");
    std::fs::remove_file(&shard).unwrap();
    assert!(matches!(refused(&files), StorageError::File { what: "open", .. }));
}

/// To open a pipe waits for who writes to it, and a device may have no end.
#[test]
fn what_is_no_file_is_refused() {
    let folder = Folder::new();
    let files = folder.path().join("saved");
    drop(saved(&files));
    for name in ["shards/shard_0001.bin", "gms_metadata.json", "manifest.json"] {
        let (path, aside) = (files.join(name), folder.path().join("aside"));
        std::fs::rename(&path, &aside).unwrap();
        for is_pipe in [true, false] {
            if is_pipe {
                let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
                rustix::fs::mknodat(CWD, &path, rustix::fs::FileType::Fifo, mode, 0).unwrap();
            } else {
                std::os::unix::fs::symlink("/dev/null", &path).unwrap();
            }
            let (told, heard) = std::sync::mpsc::channel();
            let of_thread = files.clone();
            std::thread::spawn(move || told.send(check(&of_thread)));
            let error = heard.recv_timeout(PATIENCE).expect(name).unwrap_err();
            let is_named = matches!(&error, StorageError::Damaged { path: p, .. } if *p == path);
            assert!(is_named, "{error}");
            std::fs::remove_file(&path).unwrap();
        }
        std::fs::rename(&aside, &path).unwrap();
    }
    check(&files).unwrap();
}

#[test]
fn a_byte_that_was_changed_is_refused_wherever_it_is() {
    let folder = Folder::new();
    let files = folder.path().join("saved");
    saved(&files);
    let mut random = Lcg(5);
    for shard in 0..3 {
        let path = files.join(format!("shards/shard_{shard:04}.bin"));
        let file = std::fs::File::options().read(true).write(true).open(&path).unwrap();
        let at = random.below(file.metadata().unwrap().len());
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 0x10], at).unwrap();
        let error = refused(&files);
        assert!(matches!(&error, StorageError::Damaged { path: p, .. } if *p == path), "{error}");
        file.write_all_at(&byte, at).unwrap();
    }
    loaded(&Local::start(), &files).unwrap();
}

#[test]
fn manifests_and_metadata_that_were_changed_are_refused() {
    let folder = Folder::new();
    let files = folder.path().join("saved");
    saved(&files);
    let change = |name: &str, from: &str, to: &str| {
        let path = files.join(name);
        let before = std::fs::read_to_string(&path).unwrap();
        let after = before.replacen(from, to, 1);
        assert_ne!(before, after, "{from}");
        std::fs::write(&path, after).unwrap();
        let error = refused(&files);
        assert!(matches!(error, StorageError::Damaged { .. }), "{from}: {error}");
        std::fs::write(&path, before).unwrap();
    };
    change("manifest.json", "\"weights\"", "\"weight\"");
    change("manifest.json", "shards/shard_0000.bin", "../shard_0000.bin");
    change("manifest.json", "\"chunk_bytes\": 2097152", "\"chunk_bytes\": 4194304");
    change("manifest.json", "\"chunk_bytes\": 2097152", "\"chunk_bytes\": 0");
    change("manifest.json", "{", "[");
    // Without a byte of it read, nor a lock that throws away what is published.
    let path = files.join("manifest.json");
    let before = std::fs::read_to_string(&path).unwrap();
    let mut manifest: Value = serde_json::from_str(&before).unwrap();
    manifest["checksums"]["chunk_bytes"] = (2_u64 << 30).into();
    manifest["checksums"]["crc32"] = vec![[0]; SIZES.len()].into();
    std::fs::write(&path, manifest.to_string()).unwrap();
    let error = check(&files).unwrap_err();
    assert!(matches!(error, StorageError::Damaged { .. }), "{error}");
    std::fs::write(&path, before).unwrap();
    check(&files).unwrap();
    change("gms_metadata.json", "\"AHb/\"", "\"AHb+\"");
    change("gms_metadata.json", "\"AHb/\"", "\"?\"");
    change("gms_metadata.json", "\"offset_bytes\": 1", "\"offset_bytes\": 99999999");
    loaded(&Local::start(), &files).unwrap();
}

/// Files of the Python service have no checksums.
#[test]
fn a_manifest_without_checksums_is_taken() {
    let folder = Folder::new();
    let files = folder.path().join("saved");
    let (stored, _) = saved(&files);
    let path = files.join("manifest.json");
    let mut manifest: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    manifest.as_object_mut().unwrap().remove("checksums");
    std::fs::write(&path, manifest.to_string()).unwrap();
    let local = Local::start();
    assert_eq!(loaded(&local, &files).unwrap(), Stored { checked: false, ..stored });
}

/// Other writers of such files may put an allocation anywhere in them, also where nothing can be read around the
/// page cache.
#[test]
fn an_allocation_may_begin_at_any_byte_of_its_file() {
    let folder = Folder::new();
    let files = folder.path().join("saved");
    let (stored, _) = saved(&files);
    let shard = files.join("shards/shard_0002.bin");
    let moved = [vec![7; 100], std::fs::read(&shard).unwrap()].concat();
    std::fs::write(&shard, moved).unwrap();
    let path = files.join("manifest.json");
    let mut manifest: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    assert_eq!(manifest["allocations"][3]["tensor_offset"], 0);
    manifest["allocations"][3]["tensor_offset"] = 100.into();
    std::fs::write(&path, manifest.to_string()).unwrap();
    assert_eq!(loaded(&Local::start(), &files).unwrap(), stored);
}

#[test]
fn a_save_that_breaks_off_leaves_no_folder_of_the_name() {
    let folder = Folder::new();
    let files = folder.path().join("saved");
    let local = Local::start();
    local.publish(6);
    let machine = Machine::new();
    for call in ["cuMemAllocHost_v2", "cuMemcpyDtoHAsync_v2", "cuStreamSynchronize"] {
        let mut reader = machine.connected(local.socket(), Requested::Ro);
        machine.sim.fail_nth(call, 3, cuda_sys::types::CUresult::CUDA_ERROR_UNKNOWN);
        let failed = save(&mut reader, &files, &options(), &|_| {});
        assert!(matches!(failed, Err(StorageError::Cuda(_))), "{call}: {failed:?}");
        assert!(!files.exists() && !folder.path().join("saved.partial").exists(), "{call}");
        reader.close().unwrap();
    }
    // What a process that was killed leaves is taken over.
    std::fs::create_dir_all(folder.path().join("saved.partial/shards/old")).unwrap();
    let mut reader = machine.connected(local.socket(), Requested::Ro);
    save(&mut reader, &files, &options(), &|_| {}).unwrap();
    assert!(!files.join("shards/old").exists());
    reader.close().unwrap();
    let writer = machine.connected(local.socket(), Requested::Rw);
    drop(writer);
    let mut manager = machine.manager(local.socket());
    assert!(matches!(
        save(&mut manager, &folder.path().join("b"), &options(), &|_| {}),
        Err(StorageError::NothingPublished)
    ));
    manager.connect(ConnectOptions::new(Requested::Rw).timeout(PATIENCE)).unwrap();
    let missing = load(&mut manager, &folder.path().join("none"), &options(), &|_| {});
    assert!(matches!(missing, Err(StorageError::File { what: "read", .. })), "{missing:?}");
    assert!(!manager.is_connected());
}

/// Where the system has no threads for it, fewer do the work.
#[test]
fn a_layout_is_saved_with_as_many_threads_as_there_are() {
    let local = Local::start();
    local.publish(4);
    let mut saver = Process::start("lone-saver", local.socket());
    assert_eq!(saver.hear(), "4");
    assert!(saver.end());
    loaded(&local, &local.socket().with_extension("saved")).unwrap();
}

/// As shells complete the names of folders.
#[test]
fn a_folder_may_be_named_with_a_slash_at_its_end() {
    let folder = Folder::new();
    let local = Local::start();
    local.publish(2);
    let machine = Machine::new();
    let mut reader = machine.connected(local.socket(), Requested::Ro);
    for name in ["a/", "b//", "c/.", "d/e/"] {
        let files = folder.path().join(name);
        save(&mut reader, &files, &options(), &|_| {}).unwrap();
        let again = save(&mut reader, &files, &options(), &|_| {});
        assert!(matches!(again, Err(StorageError::Exists { .. })), "{name}: {again:?}");
    }
    let entries = std::fs::read_dir(folder.path()).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["a", "b", "c", "d"], "and nothing beside them");
    reader.close().unwrap();
    loaded(&local, &folder.path().join("c/.")).unwrap();
    loaded(&local, &folder.path().join("d/e/")).unwrap();
}
