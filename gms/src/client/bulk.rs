//! Requests for many things at a time: in batches where the server takes them, else one by one.

use std::os::fd::OwnedFd;

use super::channel::Waits;
use super::connect::unexpected;
use super::{AllocationInfo, ClientError, MetadataValue, Session};
use crate::wire::*;

/// Bytes of entries that go into one message.
const PAGE_BYTES: usize = 256 << 10;

/// Sizes that go into one message.
const SIZES: usize = 4096;

type Result<T> = std::result::Result<T, ClientError>;

impl Session {
    /// Makes allocations of a tag, in this order. If the server refuses one, or one has a size that cannot be, nothing
    /// is left of the others there.
    pub fn allocate_many(&mut self, sizes: &[u64], tag: &str) -> Result<Vec<AllocationInfo>> {
        // Before any is made: what came before would be left.
        if let Some(bytes) = sizes.iter().find(|bytes| i64::try_from(**bytes).is_err()) {
            return Err(ClientError::Size { bytes: *bytes });
        }
        let mut made = Vec::with_capacity(sizes.len());
        let done = self.allocate_all(sizes, tag, &mut made);
        if matches!(done, Err(ClientError::Refused { .. })) {
            for allocation in &made {
                // The error that matters is the first.
                let _ = self.free(&allocation.allocation_id);
            }
        }
        done.map(|()| made)
    }

    fn allocate_all(
        &mut self,
        sizes: &[u64],
        tag: &str,
        made: &mut Vec<AllocationInfo>,
    ) -> Result<()> {
        if !self.batches() {
            for size in sizes {
                made.push(self.allocate(*size, tag)?);
            }
            return Ok(());
        }
        for part in sizes.chunks(SIZES) {
            let sizes = part
                .iter()
                .map(|size| i64::try_from(*size).map_err(|_| ClientError::Size { bytes: *size }));
            let sizes = sizes.collect::<Result<_>>()?;
            let request = BatchAllocateRequest { sizes, tag: tag.to_owned(), export: false };
            match self.channel().call(&request, 0, Waits::ForEver)?.0 {
                Message::BatchAllocateResponse(answer) => {
                    check_count("BatchAllocateResponse", part.len(), answer.allocations.len())?;
                    for allocation in answer.allocations {
                        made.push(allocation.try_into()?);
                    }
                }
                other => return Err(unexpected("BatchAllocateResponse", other)),
            }
        }
        Ok(())
    }

    /// Makes an allocation and brings its descriptor, in one request where that can be. If the server
    /// refuses, nothing is left of it there.
    pub fn allocate_and_export(
        &mut self,
        size: u64,
        tag: &str,
    ) -> Result<(AllocationInfo, OwnedFd)> {
        if !self.batches() {
            let made = self.allocate(size, tag)?;
            let exported = self.export(&made.allocation_id);
            if matches!(exported, Err(ClientError::Refused { .. })) {
                // The error that matters is the first.
                let _ = self.free(&made.allocation_id);
            }
            return exported;
        }
        let sizes = vec![i64::try_from(size).map_err(|_| ClientError::Size { bytes: size })?];
        let request = BatchAllocateRequest { sizes, tag: tag.to_owned(), export: true };
        let (answer, files) = self.channel().call(&request, 1, Waits::ForEver)?;
        match answer {
            Message::BatchAllocateResponse(answer) => {
                let (mut made, mut files) = (answer.allocations, files);
                match (made.pop(), files.pop()) {
                    (Some(made), Some(file)) => Ok((made.try_into()?, file)),
                    _ => Err(ClientError::Descriptors { expected: 1, found: 0 }),
                }
            }
            other => Err(unexpected("BatchAllocateResponse", other)),
        }
    }

    /// Descriptors of several allocations' memory, given to `each` as they come, in order. The server
    /// is asked for the next ones while `each` is busy, so that no more than twice
    /// [`MAX_DESCRIPTORS`] are open at a time.
    ///
    /// # Errors
    /// The first error of the server's or of `each`, which is not called again then.
    pub fn export_many(
        &mut self,
        ids: &[String],
        mut each: impl FnMut(AllocationInfo, OwnedFd) -> Result<()>,
    ) -> Result<()> {
        if !self.batches() {
            for id in ids {
                let (about, file) = self.export(id)?;
                each(about, file)?;
            }
            return Ok(());
        }
        let ask = |session: &mut Self, part: &[String]| {
            session.channel().send(&BatchExportRequest { allocation_ids: part.to_vec() })
        };
        let mut parts = ids.chunks(MAX_DESCRIPTORS).peekable();
        if let Some(first) = parts.peek() {
            ask(self, first)?;
        }
        // An error is kept until no answer is under way any more.
        let mut done = Ok(());
        while let Some(part) = parts.next() {
            let (answer, files) = self.channel().answer(part.len(), Waits::Not)?;
            let next = parts.peek().filter(|_| done.is_ok());
            if let Some(next) = next {
                ask(self, next)?;
            }
            done = match done {
                Ok(()) => take_exported(part, answer, files, &mut each),
                Err(error) => return Err(error),
            };
            if done.is_err() && next.is_none() {
                return done;
            }
        }
        done
    }

    /// Puts entries of metadata. In batches all of a message are put or none; which came before a
    /// refusal stay.
    pub fn metadata_put_many(&mut self, entries: &[(String, MetadataValue)]) -> Result<()> {
        if !self.batches() {
            for (key, entry) in entries {
                self.metadata_put(key, &entry.allocation_id, entry.offset_bytes, &entry.value)?;
            }
            return Ok(());
        }
        let (mut page, mut bytes) = (Vec::new(), 0);
        for (key, entry) in entries {
            let item = MetadataItem {
                key: key.clone(),
                allocation_id: entry.allocation_id.clone(),
                offset_bytes: i64::try_from(entry.offset_bytes)
                    .map_err(|_| ClientError::Size { bytes: entry.offset_bytes })?,
                value: entry.value.clone(),
            };
            let more = key.len() + entry.allocation_id.len() + entry.value.len() + 64;
            if bytes + more > PAGE_BYTES && !page.is_empty() {
                self.put_page(std::mem::take(&mut page))?;
                bytes = 0;
            }
            bytes += more;
            page.push(item);
        }
        if page.is_empty() { Ok(()) } else { self.put_page(page) }
    }

    fn put_page(&mut self, entries: Vec<MetadataItem>) -> Result<()> {
        match self.channel().call(&BatchMetadataPutRequest { entries }, 0, Waits::Not)?.0 {
            Message::BatchMetadataPutResponse(_) => Ok(()),
            other => Err(unexpected("BatchMetadataPutResponse", other)),
        }
    }

    /// The entries whose names begin so, with their values, sorted.
    pub fn metadata_get_many(&mut self, prefix: &str) -> Result<Vec<(String, MetadataValue)>> {
        let mut found = Vec::new();
        if !self.batches() {
            for key in self.metadata_list(prefix)? {
                if let Some(value) = self.metadata_get(&key)? {
                    found.push((key, value));
                }
            }
            return Ok(found);
        }
        let mut after = None;
        loop {
            let request = BatchMetadataGetRequest { prefix: prefix.to_owned(), after };
            let page = match self.channel().call(&request, 0, Waits::Not)?.0 {
                Message::BatchMetadataGetResponse(page) => page,
                other => return Err(unexpected("BatchMetadataGetResponse", other)),
            };
            let last = page.entries.last().map(|entry| entry.key.clone());
            if page.more && last <= request.after {
                // It would go on for ever.
                let found = "the same again".to_owned();
                return Err(ClientError::Unexpected { expected: "further entries", found });
            }
            after = last;
            for entry in page.entries {
                let value = MetadataValue {
                    allocation_id: entry.allocation_id,
                    offset_bytes: u64::try_from(entry.offset_bytes).unwrap_or_default(),
                    value: entry.value,
                };
                found.push((entry.key, value));
            }
            if !page.more {
                return Ok(found);
            }
        }
    }
}

/// Gives descriptors on that have come with an answer.
fn take_exported(
    asked: &[String],
    answer: Message,
    files: Vec<OwnedFd>,
    each: &mut impl FnMut(AllocationInfo, OwnedFd) -> Result<()>,
) -> Result<()> {
    let allocations = match answer {
        Message::BatchExportResponse(answer) => answer.allocations,
        other => return Err(unexpected("BatchExportResponse", other)),
    };
    check_count("BatchExportResponse", asked.len(), allocations.len())?;
    for (about, file) in allocations.into_iter().zip(files) {
        each(about.try_into()?, file)?;
    }
    Ok(())
}

fn check_count(expected: &'static str, asked: usize, answered: usize) -> Result<()> {
    if asked == answered {
        return Ok(());
    }
    let found = format!("one about {answered} allocations, not {asked}");
    Err(ClientError::Unexpected { expected, found })
}
