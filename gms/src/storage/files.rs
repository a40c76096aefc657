//! Files that are whole, or not there.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::io::Errno;

use super::StorageError;

/// What addresses, lengths and offsets are multiples of, where the page cache is gone around.
const DIRECT_ALIGNMENT: usize = 4096;

pub(super) fn failed(
    what: &'static str,
    path: &Path,
) -> impl FnOnce(io::Error) -> StorageError + use<> {
    let path = path.to_owned();
    move |source| StorageError::File { what, path, source }
}

/// Whether memory at this address can be written to files directly.
pub(super) fn can_be_direct(memory: &[u8]) -> bool {
    memory.as_ptr().addr().is_multiple_of(DIRECT_ALIGNMENT)
}

/// Opens a file, around the page cache if that is wanted and the file system can.
pub(super) fn open(path: &Path, write: bool, direct: bool) -> Result<File, StorageError> {
    let mut options = OpenOptions::new();
    options.read(!write).write(write).create(write).mode(0o644);
    if direct {
        let mut direct = options.clone();
        direct.custom_flags(OFlags::DIRECT.bits() as i32);
        match direct.open(path) {
            Err(error) if error.raw_os_error() == Some(Errno::INVAL.raw_os_error()) => {}
            opened => return opened.map_err(failed("open", path)),
        }
    }
    options.open(path).map_err(failed("open", path))
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
        std::fs::create_dir_all(&path).map_err(failed("make", &path))?;
        let folder = File::open(&path).map_err(failed("open", &path))?;
        match flock(&folder, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => return Err(StorageError::Busy { path: name }),
            Err(error) => return Err(failed("lock", &path)(error.into())),
        }
        let draft = Self { path, name, folder, kept: false };
        draft.empty().map_err(failed("empty", &draft.path))?;
        Ok(draft)
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
        let parent_folder = File::open(parent).map_err(failed("open", parent))?;
        parent_folder.sync_all().map_err(failed("write", parent))
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if !self.kept {
            let _ = std::fs::remove_dir_all(&self.path);
        }
    }
}
