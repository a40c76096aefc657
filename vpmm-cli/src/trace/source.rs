//! From a path or a pipe to numbered lines, through gzip where there is gzip.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};

use flate2::bufread::GzDecoder;

use super::error::{Column, Problem, TraceError};
use super::row::WHOLE_ROW;

/// Longer lines are refused: a file with no line ends would otherwise be read
/// into memory whole before the first complaint.
const LONGEST_LINE_BYTES: usize = 64 << 10;

/// More zeroes at the end are refused: a device such as /dev/zero has no end of them. Logs are written ahead by far
/// less.
const MOST_ZEROES: u64 = 64 << 20;

const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// Opens `path`, or standard input where it is `-`; and how many bytes it has, if it is a file.
pub(super) fn open(path: &str) -> io::Result<(Box<dyn Read>, Option<u64>)> {
    if path == "-" {
        return Ok((Box::new(io::stdin().lock()), None));
    }
    let file = File::open(path)?;
    let metadata = file.metadata()?;
    // Opening a folder succeeds on Linux; only reading it fails, less clearly.
    if metadata.is_dir() {
        return Err(io::Error::from(io::ErrorKind::IsADirectory));
    }
    let bytes = metadata.is_file().then_some(metadata.len());
    Ok((Box::new(file), bytes))
}

/// The lines of a plain or gzip source, numbered from 1, without their ends.
pub(super) struct Lines<'a> {
    name: &'a str,
    source: Box<dyn BufRead + 'a>,
    line: Vec<u8>,
    number: u64,
}

impl<'a> Lines<'a> {
    /// Looks at the first two bytes and decompresses if they say gzip.
    pub(super) fn new(name: &'a str, mut bytes: impl Read + 'a) -> Result<Self, TraceError> {
        let mut head = Vec::with_capacity(GZIP_MAGIC.len());
        bytes
            .by_ref()
            .take(GZIP_MAGIC.len() as u64)
            .read_to_end(&mut head)
            .map_err(|source| TraceError::Read { file: name.to_owned(), line: 1, source })?;
        let is_gzip = head == GZIP_MAGIC;
        let whole = BufReader::with_capacity(64 << 10, io::Cursor::new(head).chain(bytes));
        let source: Box<dyn BufRead + 'a> = if is_gzip {
            Box::new(BufReader::with_capacity(64 << 10, Gzip::new(whole)))
        } else {
            Box::new(whole)
        };
        Ok(Self { name, source, line: Vec::new(), number: 0 })
    }

    /// The next line and its number, or `None` at the end.
    pub(super) fn next_line(&mut self) -> Result<Option<(u64, &[u8])>, TraceError> {
        self.line.clear();
        self.number += 1;
        let unreadable =
            |source| TraceError::Read { file: self.name.to_owned(), line: self.number, source };
        let read = self
            .source
            .by_ref()
            .take(LONGEST_LINE_BYTES as u64 + 1)
            .read_until(b'\n', &mut self.line)
            .map_err(unreadable)?;
        if read == 0 {
            return Ok(None);
        }
        let refused = |problem| TraceError::Row {
            file: self.name.to_owned(),
            line: self.number,
            column: Column { number: 1, name: WHOLE_ROW },
            problem,
        };
        // A log that is written ahead, and whose program was killed, has zeroes behind its last row.
        if let Some(zero) = self.line.iter().position(|byte| *byte == 0) {
            let rest = match self.line[zero..].iter().all(|byte| *byte == 0) {
                true => zeroes_to_the_end(&mut self.source).map_err(unreadable)?,
                false => Rest::Others,
            };
            match rest {
                Rest::Zeroes => {}
                Rest::Others => return Err(refused(Problem::Zeroes)),
                Rest::Endless => return Err(refused(Problem::EndlessZeroes(MOST_ZEROES))),
            }
            self.line.truncate(zero);
            if self.line.is_empty() {
                return Ok(None);
            }
        }
        if self.line.len() > LONGEST_LINE_BYTES {
            return Err(refused(Problem::LongLine(LONGEST_LINE_BYTES)));
        }
        let mut line = self.line.as_slice();
        line = line.strip_suffix(b"\n").unwrap_or(line);
        while let Some(shorter) = line.strip_suffix(b"\r") {
            line = shorter;
        }
        // It ends a row by the rules of CSV: what comes after it would be passed over.
        if line.contains(&b'\r') {
            return Err(refused(Problem::CarriageReturn));
        }
        if self.number == 1 {
            line = line.strip_prefix(BYTE_ORDER_MARK).unwrap_or(line);
        }
        Ok(Some((self.number, line)))
    }
}

/// The members of a gzip file as one, and the zeroes behind them that come of devices with blocks of one
/// size, which gzip itself passes over.
struct Gzip<R> {
    /// None behind the end.
    member: Option<GzDecoder<R>>,
}

impl<R: BufRead> Gzip<R> {
    fn new(source: R) -> Self {
        Self { member: Some(GzDecoder::new(source)) }
    }
}

impl<R: BufRead> Read for Gzip<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while let Some(member) = &mut self.member {
            let read = member.read(buffer)?;
            if read > 0 || buffer.is_empty() {
                return Ok(read);
            }
            let Some(mut rest) = self.member.take().map(GzDecoder::into_inner) else { break };
            let refused = |text: String| Err(io::Error::new(io::ErrorKind::InvalidData, text));
            match rest.fill_buf()?.first().copied() {
                None => {}
                Some(0) => match zeroes_to_the_end(&mut rest)? {
                    Rest::Zeroes => {}
                    Rest::Others => {
                        let text = "zero bytes behind the gzip data, and others behind them";
                        return refused(text.to_owned());
                    }
                    Rest::Endless => {
                        let text =
                            format!("more than {MOST_ZEROES} zero bytes behind the gzip data");
                        return refused(text);
                    }
                },
                Some(_) => self.member = Some(GzDecoder::new(rest)),
            }
        }
        Ok(0)
    }
}

/// What follows.
enum Rest {
    /// Zeroes to the end, or nothing.
    Zeroes,
    /// Another byte.
    Others,
    /// More than [`MOST_ZEROES`].
    Endless,
}

/// Reads on, to the first byte that is not zero.
fn zeroes_to_the_end(source: &mut impl BufRead) -> io::Result<Rest> {
    let mut zeroes = 0;
    while zeroes <= MOST_ZEROES {
        let part = source.fill_buf()?;
        if part.iter().any(|byte| *byte != 0) {
            return Ok(Rest::Others);
        }
        let length = part.len();
        if length == 0 {
            return Ok(Rest::Zeroes);
        }
        source.consume(length);
        zeroes += length as u64;
    }
    Ok(Rest::Endless)
}
