//! A file that is written through mappings of its end.
//!
//! ```text
//! rows so far │ rows, then zeroes │ zeroes
//!             └ the window ───────┴ the next one, mapped once a quarter of the first is full
//! ```
//!
//! A row is put into the window under a spinning lock, some nanoseconds each. What takes longer (room on
//! the disk, zeroes, a mapping) is done ahead and outside that lock, by one thread at a time.

use std::fs::File;
use std::io::{self, IoSlice};
use std::os::unix::fs::FileExt;
use std::ptr::{self, NonNull};
use std::sync::{Mutex, PoisonError};

use rustix::fs::{FallocateFlags, FlockOperation, fallocate, flock};
use rustix::io::{pwritev, retry_on_intr};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

use super::row::{COMMON, Line};
use crate::lock::SpinLock;

/// The part of a file that is mapped at a time: some 4,000 rows, little enough to stay in a processor's
/// cache from its zeroes to its rows. A multiple of every page size.
const WINDOW: usize = 256 << 10;

/// Here the next window is made: early, so that several threads do not come to its end before.
const QUARTER: usize = WINDOW / 4;

/// From here on a window has no room for every line.
const NEARLY_FULL: usize = WINDOW - COMMON + 1;

/// What a window holds at first, many times over.
static ZEROES: [u8; 4 << 10] = [0; 4 << 10];

/// The file.
pub(super) struct LogFile {
    file: File,
    end: SpinLock<End>,
    /// Held by who makes a window. Taken before `end`, never under it.
    making: Mutex<()>,
}

/// Where rows go.
struct End {
    window: Window,
    /// How much of the window is written.
    used: usize,
    /// Where in the window something besides a line is to be done: at its quarter, and where it is
    /// nearly full.
    look_at: usize,
    /// What comes behind the window.
    next: Option<Window>,
}

impl LogFile {
    pub(super) fn new(file: File) -> io::Result<Self> {
        let window = Window::map(&file, 0)?;
        let end = SpinLock::new(End { window, used: 0, look_at: QUARTER, next: None });
        Ok(Self { file, end, making: Mutex::new(()) })
    }

    /// Writes a row of at most a line, in its place.
    #[inline]
    pub(super) fn put(&self, put: impl Fn(&mut Line<'_>)) -> io::Result<()> {
        {
            let mut end = self.end.lock();
            if end.used < end.look_at {
                end.put(&put);
                return Ok(());
            }
        }
        self.put_and_look(&put)
    }

    #[cold]
    #[inline(never)]
    fn put_and_look(&self, put: &dyn Fn(&mut Line<'_>)) -> io::Result<()> {
        {
            let mut end = self.end.lock();
            if end.used < NEARLY_FULL {
                end.put(put);
                let is_mine = end.used >= end.look_at;
                end.look_at = NEARLY_FULL;
                drop(end);
                if is_mine {
                    // What fails here is tried again, and told, where it is needed.
                    let _ = self.make_next();
                }
                return Ok(());
            }
        }
        let mut bytes = [0; COMMON];
        let mut line = Line::new(&mut bytes);
        put(&mut line);
        self.write(line.text())
    }

    /// Writes a row of any length up to a window's, all of it or nothing.
    pub(super) fn write(&self, row: &[u8]) -> io::Result<()> {
        if row.len() > WINDOW {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        loop {
            {
                let mut end = self.end.lock();
                let room = WINDOW - end.used;
                if row.len() <= room {
                    end.copy(row);
                    return Ok(());
                }
                if let Some(next) = end.next.take() {
                    let (first, rest) = row.split_at(room);
                    end.copy(first);
                    let full = std::mem::replace(&mut end.window, next);
                    (end.used, end.look_at) = (0, QUARTER);
                    end.copy(rest);
                    drop(end);
                    // Without the lock: it is a call.
                    drop(full);
                    return Ok(());
                }
            }
            self.make_next()?;
        }
    }

    /// Maps what comes behind the window, if nobody has yet.
    fn make_next(&self) -> io::Result<()> {
        let _alone = self.making.lock().unwrap_or_else(PoisonError::into_inner);
        // It stays the last one: another takes its place only when there is a next one, which is made
        // here alone.
        let start = {
            let end = self.end.lock();
            if end.next.is_some() {
                return Ok(());
            }
            end.window.start + WINDOW as u64
        };
        let next = Window::map(&self.file, start)?;
        self.end.lock().next = Some(next);
        Ok(())
    }

    /// Has all rows on the disk. The kernel knows which pages were written through the mappings.
    pub(super) fn flush(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    /// Takes away what is behind the last row; another log may have the file.
    pub(super) fn cut(&mut self) {
        let end = self.end.get_mut();
        // A file that cannot be cut keeps its zero bytes.
        let _ = self.file.set_len(end.window.start + end.used as u64);
        // Children of the process may have it open still.
        let _ = flock(&self.file, FlockOperation::Unlock);
    }
}

impl End {
    /// Puts down a line where there is room for every line.
    #[inline]
    fn put(&mut self, put: impl Fn(&mut Line<'_>)) {
        debug_assert!(self.used < NEARLY_FULL);
        // SAFETY: `used` is within the window.
        let mut place = unsafe { self.window.bytes.add(self.used) }.cast::<[u8; COMMON]>();
        // SAFETY: callers have seen that there is room for a whole line; the window is this value's own
        // writable mapping and used through `&mut self` alone; bytes need no alignment, and all are valid.
        let place = unsafe { place.as_mut() };
        let mut line = Line::new(place);
        put(&mut line);
        self.used += line.text().len();
    }

    /// Copies what there is room for.
    fn copy(&mut self, part: &[u8]) {
        debug_assert!(part.len() <= WINDOW - self.used);
        // SAFETY: `used` and the part together are within the window, as callers have seen; it is this
        // value's own writable mapping; the part is elsewhere.
        unsafe {
            let to = self.window.bytes.as_ptr().add(self.used);
            ptr::copy_nonoverlapping(part.as_ptr(), to, part.len());
        }
        self.used += part.len();
    }
}

/// A mapped part of a file.
struct Window {
    bytes: NonNull<u8>,
    /// Where in the file it begins.
    start: u64,
}

// SAFETY: the mapping is this value's own, and who uses it has it to himself.
unsafe impl Send for Window {}

impl Window {
    /// Maps the window that begins at `start`. The disk has the room before a byte of it is touched: a
    /// write to a mapping cannot fail otherwise than by a signal.
    fn map(file: &File, start: u64) -> io::Result<Self> {
        match fallocate(file, FallocateFlags::empty(), start, WINDOW as u64) {
            Ok(()) => {}
            // A file system that cannot promise room: the zeroes take it.
            Err(rustix::io::Errno::OPNOTSUPP) => file.set_len(start + WINDOW as u64)?,
            Err(error) => return Err(error.into()),
        }
        fill(file, start)?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no other memory; the file
        // is as long as that. Who cuts it meanwhile makes the next row a signal, as for every mapping.
        let bytes =
            unsafe { mmap(ptr::null_mut(), WINDOW, access, MapFlags::SHARED, file, start) }?;
        // All its pages at once, which is cheaper than a fault for each. Linux before 5.14 refuses.
        // SAFETY: the mapping just made, whose contents this leaves as they are.
        let _ = unsafe { madvise(bytes, WINDOW, Advice::LinuxPopulateWrite) };
        let bytes = NonNull::new(bytes.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { bytes, start })
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: mapped in `map` with this length, and nobody has a pointer into it.
        let _ = unsafe { munmap(self.bytes.as_ptr().cast(), WINDOW) };
    }
}

/// Writes the zeroes of the window at `start`. Its pages are then in the kernel's cache and dirty,
/// which on ext4 costs a third of finding each by a fault: of reading it as zeroes, and of a
/// transaction for its first write. In one call, by whose length the kernel chooses how large
/// the pieces are in which it keeps them.
fn fill(file: &File, start: u64) -> io::Result<()> {
    let window = [IoSlice::new(&ZEROES); WINDOW / ZEROES.len()];
    let written = retry_on_intr(|| pwritev(file, &window, start))?;
    // What a call that stopped early has left.
    let (mut at, end) = (start + written as u64, start + WINDOW as u64);
    while at < end {
        let part = ZEROES.len().min((end - at) as usize);
        file.write_all_at(&ZEROES[..part], at)?;
        at += part as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Path(std::path::PathBuf);

    impl Drop for Path {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.0);
        }
    }

    fn log(name: &str) -> (Path, LogFile) {
        let name = format!("vpmm-log-file-{}-{name}", std::process::id());
        let path = Path(std::env::temp_dir().join(name));
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(true);
        let file = options.open(&path.0).and_then(LogFile::new);
        (path, file.expect("a file"))
    }

    /// A row of a number, so long.
    fn row(number: usize, length: usize) -> Vec<u8> {
        let mut row = format!("{number:x},").into_bytes();
        row.resize(length - 1, b'a' + (number % 26) as u8);
        row.push(b'\n');
        row
    }

    #[test]
    fn rows_of_every_length_follow_each_other_through_windows() {
        let (path, mut file) = log("lengths");
        let mut expected = Vec::new();
        let mut add = |text: &[u8]| expected.extend_from_slice(text);
        for number in 0..30_000 {
            // Most are lines; some end where a window does, or begin there.
            let text = match number % 97 {
                0 => row(number, 1000 + number % 300),
                1 => row(number, 8),
                _ => row(number, 20 + number % 80),
            };
            if text.len() > COMMON {
                file.write(&text).expect("written");
            } else {
                let put = |line: &mut Line<'_>| text.iter().for_each(|byte| line.extend(&[*byte]));
                file.put(put).expect("written");
            }
            add(&text);
        }
        for length in [WINDOW, WINDOW - 1, 7, WINDOW] {
            let text = row(length, length);
            file.write(&text).expect("written");
            add(&text);
        }
        assert!(file.write(&row(1, WINDOW + 1)).is_err(), "longer than a window");
        file.flush().expect("on the disk");
        let before = std::fs::read(&path.0).expect("there");
        assert!(before[..expected.len()] == expected[..]);
        assert!(before[expected.len()..].iter().all(|byte| *byte == 0), "zeroes are behind it");
        file.cut();
        drop(file);
        assert!(std::fs::read(&path.0).expect("there") == expected);
    }

    #[test]
    fn rows_of_many_threads_are_all_there() {
        let (path, mut file) = log("threads");
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let file = &file;
                scope.spawn(move || {
                    for number in 0..10_000 {
                        let text = row(4 * number + thread, 40 + number % 50);
                        let put = |line: &mut Line<'_>| {
                            text.iter().for_each(|byte| line.extend(&[*byte]));
                        };
                        file.put(put).expect("written");
                    }
                });
            }
        });
        file.cut();
        drop(file);
        let text = std::fs::read_to_string(&path.0).expect("text");
        let mut numbers: Vec<_> = text
            .lines()
            .map(|line| {
                let (number, rest) = line.split_once(',').expect("a number");
                let number = usize::from_str_radix(number, 16).expect("a number");
                assert_eq!(line.len() + 1, 40 + number / 4 % 50);
                assert!(rest.bytes().all(|byte| byte == b'a' + (number % 26) as u8));
                number
            })
            .collect();
        numbers.sort_unstable();
        assert!(numbers.into_iter().eq(0..40_000));
    }
}
