//! Requests whose answers have descriptors beside them, and those that make what they are of.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use super::allocate::Allocated;
use super::requests::{Refused, described};
use super::service::Core;
use super::session::{End, Session};
use crate::layout::Allocation;
use crate::memory::Extent;
use crate::wire::{
    AllocateRequest, AllocateResponse, BatchAllocateRequest, BatchAllocateResponse,
    BatchExportResponse, Encode, ExportAllocationResponse, MAX_DESCRIPTORS,
};

impl Session {
    pub(super) fn allocate_one(&mut self, request: &AllocateRequest) -> Result<(), End> {
        let (made, extent) = match self.allocate(request.size, &request.tag)? {
            Allocated::Done(made, extent) => (made, extent),
            Allocated::Refused(error) => return self.refuse(error),
        };
        self.answer(&AllocateResponse {
            allocation_id: made.id.to_string(),
            size: made.size as i64,
            aligned_size: made.aligned_size as i64,
            layout_slot: made.slot as i64,
        })?;
        // The client asks for the descriptor next, and it is made while the answer is on its way.
        // Where it cannot be, that request says so.
        let _ = extent.descriptor();
        Ok(())
    }

    pub(super) fn allocate_many(&mut self, request: &BatchAllocateRequest) -> Result<(), End> {
        if request.export && request.sizes.len() > MAX_DESCRIPTORS {
            return self.refuse(too_many(request.sizes.len()));
        }
        let mut made = Vec::with_capacity(request.sizes.len());
        let mut refused = None;
        for size in &request.sizes {
            match self.allocate(*size, &request.tag)? {
                Allocated::Done(allocation, extent) => made.push((allocation, extent)),
                Allocated::Refused(error) => {
                    refused = Some(error);
                    break;
                }
            }
        }
        if request.sizes.len() > 1 {
            self.ahead.forget();
        }
        let mut files = Vec::new();
        if request.export && refused.is_none() {
            match descriptors(made.iter().map(|(_, extent)| extent)) {
                Ok(exported) => files = exported,
                Err(Refused(error)) => refused = Some(error),
            }
        }
        if let Some(error) = refused {
            self.free_all(&made);
            return self.refuse(error);
        }
        let allocations = made.iter().map(|(allocation, _)| described(allocation)).collect();
        // Descriptors that were not asked for are made as they are: while the client maps the first
        // of them, the next are made.
        if !self.send_with(&BatchAllocateResponse { allocations }, &files)? {
            self.free_all(&made);
        }
        Ok(())
    }

    fn free_all(&mut self, made: &[(Allocation, Arc<Extent>)]) {
        for (allocation, _) in made {
            self.free(&allocation.id);
        }
    }

    pub(super) fn export(&mut self, id: &str) -> Result<(), End> {
        let found = find(&self.service.core(), id);
        let exported = found.and_then(|(about, extent)| Ok((about, extent.descriptor()?)));
        match exported {
            Ok((about, file)) => {
                let answer = ExportAllocationResponse {
                    allocation_id: about.id.to_string(),
                    size: about.size as i64,
                    aligned_size: about.aligned_size as i64,
                    tag: about.tag.to_string(),
                    layout_slot: about.slot as i64,
                };
                self.send_with(&answer, &[file]).map(drop)
            }
            Err(Refused(error)) => self.refuse(error),
        }
    }

    pub(super) fn export_many(&mut self, ids: &[String]) -> Result<(), End> {
        if ids.len() > MAX_DESCRIPTORS {
            return self.refuse(too_many(ids.len()));
        }
        let found: Result<Vec<_>, Refused> = {
            let core = self.service.core();
            ids.iter().map(|id| find(&core, id)).collect()
        };
        let exported = found
            .and_then(|found| Ok((descriptors(found.iter().map(|(_, extent)| extent))?, found)));
        match exported {
            Ok((files, found)) => {
                let allocations = found.iter().map(|(about, _)| described(about)).collect();
                self.send_with(&BatchExportResponse { allocations }, &files).map(drop)
            }
            Err(Refused(error)) => self.refuse(error),
        }
    }

    fn send_with(&mut self, message: &impl Encode, files: &[Arc<OwnedFd>]) -> Result<bool, End> {
        self.service.counters.exports.add(files.len() as u64);
        let borrowed: Vec<BorrowedFd<'_>> = files.iter().map(|file| file.as_fd()).collect();
        self.send(message, &borrowed)
    }
}

fn too_many(asked: usize) -> String {
    format!("{asked} descriptors asked for, {MAX_DESCRIPTORS} is the most in one message")
}

fn find(core: &Core, id: &str) -> Result<(Allocation, Arc<Extent>), Refused> {
    let about = core.layout.get(id)?;
    let extent =
        core.extents.get(id).ok_or_else(|| Refused(format!("Unknown allocation: {id}")))?;
    Ok((about.clone(), Arc::clone(extent)))
}

fn descriptors<'a>(
    extents: impl Iterator<Item = &'a Arc<Extent>>,
) -> Result<Vec<Arc<OwnedFd>>, Refused> {
    extents.map(|extent| Ok(extent.descriptor()?)).collect()
}
