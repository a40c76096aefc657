//! `vpmm snapshot`: a layout in files, and back.

use std::io::{ErrorKind, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use gms::client::{ClientError, ConnectOptions, MemoryManager, runtime_state};
use gms::lock::Requested;
use gms::memory::Memory;
use gms::storage::{StorageError, StorageOptions, Stored, check, load, save};
use gms::wire::GetRuntimeStateResponse;
use serde_json::json;

use super::args::{SnapshotArgs, SnapshotCommand, SnapshotPlace};
use super::run::{driver, ordinal};
use super::thousandths;
use crate::command::bar;
use crate::exit::{Abort, Exit};

/// `vpmm snapshot save` and `vpmm snapshot load`.
pub(crate) fn snapshot(args: &SnapshotArgs, out: &mut dyn Write) -> Result<Exit, Abort> {
    let (place, lock) = match &args.command {
        SnapshotCommand::Save(save) => (&save.place, Requested::Ro),
        SnapshotCommand::Load(place) => (place, Requested::Rw),
    };
    if lock == Requested::Rw {
        // Before anybody's lock is asked for, which throws away what is published.
        check(&place.folder).map_err(abort)?;
    } else if place.folder.symlink_metadata().is_ok() {
        return Err(abort(StorageError::Exists { path: place.folder.clone() }));
    }
    let mut manager = connect(place, lock)?;
    let mut options = StorageOptions::default();
    if let SnapshotCommand::Save(save) = &args.command {
        options.shard_bytes = save.shard.0;
    }
    options.workers = place.workers.get();
    options.direct = !place.no_direct;
    let started = Instant::now();
    let (what, stored) = match lock {
        Requested::Ro => ("saved", with_bar(&mut manager, &place.folder, &options, save)),
        _ => ("loaded", with_bar(&mut manager, &place.folder, &options, load)),
    };
    let stored = stored.map_err(abort)?;
    let seconds = started.elapsed().as_secs_f64();
    let line = json!({
        "what": what,
        "allocations": stored.allocations,
        "bytes": stored.bytes,
        "metadata": stored.metadata,
        "layout_hash": stored.layout_hash,
        "checked": stored.checked,
        "seconds": thousandths(seconds),
        "gb_per_s": thousandths(stored.bytes as f64 / 1e9 / seconds.max(1e-9)),
    });
    writeln!(out, "{line}")?;
    Ok(Exit::Done)
}

/// Files that are not as they must be are the caller's to mend; the rest went wrong here.
fn abort(error: StorageError) -> Abort {
    match error {
        StorageError::Damaged { .. } | StorageError::Exists { .. } => Abort::bad_input(error),
        StorageError::File { ref source, .. }
            if matches!(source.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) =>
        {
            Abort::bad_input(error)
        }
        error => Abort::failure(error),
    }
}

fn connect(place: &SnapshotPlace, lock: Requested) -> Result<MemoryManager, Abort> {
    let driver = driver(place.device)?;
    let ordinal = ordinal(place.device);
    let socket = match &place.socket_path {
        Some(path) => path.clone(),
        None => {
            let uuid = Memory::open(&driver, ordinal).and_then(|memory| memory.uuid());
            gms::socket_path(&uuid.map_err(Abort::failure)?, &place.tag)
        }
    };
    let mut manager = MemoryManager::new(&driver, ordinal, &socket).map_err(Abort::failure)?;
    let timeout = Duration::try_from_secs_f64(place.timeout)
        .map_err(|error| Abort::bad_input(format_args!("--timeout: {error}")))?;
    let options = ConnectOptions::new(lock).timeout(timeout);
    manager.connect(options).map_err(|error| {
        let (path, seconds) = (socket.display(), place.timeout);
        Abort::failure(match error {
            ClientError::LockTimeout => {
                let session = if lock == Requested::Ro { "reader" } else { "writer" };
                let why = runtime_state(&socket, STATE_TIME).ok();
                let why = why.and_then(|state| in_the_way(&state, lock)).unwrap_or_default();
                format!("the server at {path} let no {session} in within {seconds} s{why}")
            }
            ClientError::Connect { source, .. } => {
                let why = match source.kind() {
                    ErrorKind::NotFound => "nothing is at that path".to_owned(),
                    ErrorKind::ConnectionRefused => "nobody listens at that path".to_owned(),
                    _ => source.to_string(),
                };
                format!("no server at {path} within {seconds} s: {why}")
            }
            ClientError::Disconnected => {
                format!("the server at {path} has closed the connection instead of an answer")
            }
            error => error.to_string(),
        })
    })?;
    Ok(manager)
}

/// How long a server may take to say what keeps a lock from being granted.
const STATE_TIME: Duration = Duration::from_secs(2);

/// What keeps a lock from being granted, if it still does.
fn in_the_way(state: &GetRuntimeStateResponse, lock: Requested) -> Option<String> {
    Some(match lock {
        _ if state.has_rw_session => ": a writer is there".to_owned(),
        Requested::Ro if state.waiting_writers > 0 => {
            ": a writer waits, and comes first".to_owned()
        }
        Requested::Ro if !state.committed => ": no layout is published there".to_owned(),
        Requested::Rw if state.ro_session_count == 1 => ": a reader is there".to_owned(),
        Requested::Rw if state.ro_session_count > 1 => {
            format!(": {} readers are there", state.ro_session_count)
        }
        _ => return None,
    })
}

/// Either direction.
type Way = fn(
    &mut MemoryManager,
    &Path,
    &StorageOptions,
    &(dyn Fn(u64) + Sync),
) -> Result<Stored, StorageError>;

fn with_bar(
    manager: &mut MemoryManager,
    folder: &Path,
    options: &StorageOptions,
    way: Way,
) -> Result<Stored, StorageError> {
    // A reader knows what there is; a writer's bar has no end before it has read the manifest, and
    // then the bytes are soon there.
    let total = manager
        .list_handles(None)
        .map_or(0, |handles| handles.iter().map(|handle| handle.aligned_size).sum());
    let bar = bar(total);
    bar.set_message(folder.display().to_string());
    let stored = way(manager, folder, options, &|done| {
        if done > bar.length().unwrap_or(0) {
            bar.set_length(done);
        }
        bar.set_position(done);
    });
    bar.finish_and_clear();
    stored
}
