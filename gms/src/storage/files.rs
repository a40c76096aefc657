//! Files that are whole, or not there.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::io::Errno;

use super::StorageError;

/// What addresses, lengths and offsets are multiples of, where the page cache is gone around.
const DIRECT_ALIGNMENT: u64 = 4096;

pub(super) fn failed(
    what: &'static str,
    path: &Path,
) -> impl FnOnce(io::Error) -> StorageError + use<> {
    let path = path.to_owned();
    move |source| StorageError::File { what, path, source }
}

/// A file of a layout's bytes, open twice: which of the two is used depends on the memory and the place.
#[derive(Debug)]
pub(super) struct Shard {
    pub(super) plain: File,
    direct: File,
}

impl Shard {
    pub(super) fn open(path: &Path, write: bool, direct: bool) -> Result<Self, StorageError> {
        Ok(Self { plain: open(path, write, false)?, direct: open(path, write, direct)? })
    }

    /// The one by which memory goes to or comes from that place.
    pub(super) fn of(&self, memory: &[u8], at: u64) -> &File {
        let is_aligned = |number: u64| number.is_multiple_of(DIRECT_ALIGNMENT);
        let numbers = [memory.as_ptr().addr() as u64, memory.len() as u64, at];
        if numbers.into_iter().all(is_aligned) { &self.direct } else { &self.plain }
    }
}

/// Opens a file, around the page cache if that is wanted and the file system can.
fn open(path: &Path, write: bool, direct: bool) -> Result<File, StorageError> {
    let mut options = OpenOptions::new();
    options.read(!write).write(write).create(write).mode(0o644);
    // Whoever opens a pipe waits for its other end. To a file it means nothing.
    let flags = OFlags::NONBLOCK;
    let try_open = |flags: OFlags| options.clone().custom_flags(flags.bits() as i32).open(path);
    let opened = match try_open(if direct { flags | OFlags::DIRECT } else { flags }) {
        Err(error) if direct && error.raw_os_error() == Some(Errno::INVAL.raw_os_error()) => {
            try_open(flags)
        }
        opened => opened,
    };
    let file = opened.map_err(failed("open", path))?;
    if !file.metadata().map_err(failed("look at", path))?.is_file() {
        // What it gives has perhaps no end.
        let (path, reason) = (path.to_owned(), "it is no file".to_owned());
        return Err(StorageError::Damaged { path, reason });
    }
    Ok(file)
}

/// Reads a file.
pub(super) fn read_whole(path: &Path) -> Result<Vec<u8>, StorageError> {
    let read = || {
        let (mut file, mut bytes) = (open(path, false, false)?, Vec::new());
        file.read_to_end(&mut bytes).map_err(failed("read", path))?;
        Ok(bytes)
    };
    read().map_err(|error| match error {
        StorageError::File { path, source, .. } => {
            StorageError::File { what: "read", path, source }
        }
        error => error,
    })
}

/// Writes a file and sees it to the disk.
pub(super) fn write_whole(path: &Path, bytes: &[u8]) -> Result<(), StorageError> {
    let write = || {
        let mut file = File::create(path)?;
        file.write_all(bytes)?;
        file.sync_all()
    };
    write().map_err(failed("write", path))
}

/// Sees the names in a folder to the disk: a file that is there without its name is lost.
pub(super) fn sync_folder(path: &Path) -> Result<(), StorageError> {
    let folder = File::open(path).map_err(failed("open", path))?;
    folder.sync_all().map_err(failed("write", path))
}

/// A folder that is being filled and gets its name once it is whole. It goes if it does not come to
/// that; what a process that was killed has left is taken over by the next.
#[derive(Debug)]
pub(super) struct Draft {
    path: PathBuf,
    name: PathBuf,
    /// Holds the folder's lock.
    folder: File,
    kept: bool,
}

impl Draft {
    pub(super) fn begin(name: &Path) -> Result<Self, StorageError> {
        if name.symlink_metadata().is_ok() {
            return Err(StorageError::Exists { path: name.to_owned() });
        }
        // Without a slash at its end, behind which the draft would lie in the folder itself.
        let name: PathBuf = name.components().collect();
        let mut path = name.as_os_str().to_owned();
        path.push(".partial");
        let path = PathBuf::from(path);
        let folder = loop {
            std::fs::create_dir_all(&path).map_err(failed("make", &path))?;
            let folder = match File::open(&path) {
                Ok(folder) => folder,
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => return Err(failed("open", &path)(error)),
            };
            if let Some(folder) = Self::lock(folder, &path, &name)? {
                break folder;
            }
        };
        // Which may have come about meanwhile.
        if name.symlink_metadata().is_ok() {
            let _ = std::fs::remove_dir(&path);
            return Err(StorageError::Exists { path: name });
        }
        let draft = Self { path, name, folder, kept: false };
        draft.empty().map_err(failed("empty", &draft.path))?;
        Ok(draft)
    }

    /// The folder with its lock; `None` where the one that had it has given the folder its name, or removed it,
    /// since it was opened.
    fn lock(folder: File, path: &Path, name: &Path) -> Result<Option<File>, StorageError> {
        match flock(&folder, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => return Err(StorageError::Busy { path: name.to_owned() }),
            Err(error) => return Err(failed("lock", path)(error.into())),
        }
        let mine = folder.metadata().map_err(failed("look at", path))?;
        let there = std::fs::metadata(path);
        let is_there = there.is_ok_and(|it| (it.dev(), it.ino()) == (mine.dev(), mine.ino()));
        Ok(is_there.then_some(folder))
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    fn empty(&self) -> io::Result<()> {
        for entry in std::fs::read_dir(&self.path)? {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                std::fs::remove_dir_all(entry.path())?;
            } else {
                std::fs::remove_file(entry.path())?;
            }
        }
        Ok(())
    }

    /// Gives the folder its name, on the disk as well.
    pub(super) fn finish(mut self) -> Result<(), StorageError> {
        self.folder.sync_all().map_err(failed("write", &self.path))?;
        std::fs::rename(&self.path, &self.name).map_err(failed("name", &self.name))?;
        self.kept = true;
        let parent = match self.name.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        sync_folder(parent)
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if !self.kept {
            let _ = std::fs::remove_dir_all(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Another process has opened the folder, and comes to its lock when the first is done with it.
    #[test]
    fn whoever_comes_late_to_a_lock_does_not_fill_what_has_its_name() {
        let parent = std::env::temp_dir().join(format!("gms-drafts-{}", std::process::id()));
        std::fs::create_dir_all(&parent).unwrap();
        let (layout, other) = (parent.join("layout"), parent.join("other"));
        let late = |name: &Path, end: fn(Draft)| {
            let draft = Draft::begin(name).unwrap();
            let path = draft.path().to_owned();
            let [early, late] = [(); 2].map(|()| File::open(&path).unwrap());
            assert!(matches!(Draft::lock(early, &path, name), Err(StorageError::Busy { .. })));
            write_whole(&path.join("contents"), b"whole").unwrap();
            end(draft);
            assert!(Draft::lock(late, &path, name).unwrap().is_none());
            // Nor does it do so where a third has begun meanwhile.
            if !name.exists() {
                let late = File::open(Draft::begin(name).unwrap().path()).unwrap();
                let third = Draft::begin(name).unwrap();
                assert!(Draft::lock(late, third.path(), name).unwrap().is_none());
            }
        };
        late(&layout, |draft| draft.finish().unwrap());
        late(&other, drop);
        assert!(matches!(Draft::begin(&layout), Err(StorageError::Exists { .. })));
        assert_eq!(std::fs::read_dir(&layout).unwrap().count(), 1);
        std::fs::remove_dir_all(&parent).unwrap();
    }
}
