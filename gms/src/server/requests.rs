//! What a session may ask for once it has its lock.

use std::sync::Arc;

use super::ServerError;
use super::session::{End, Session};
use crate::layout::{Allocation, Layout};
use crate::lock::Granted;
use crate::wire::*;

/// A request that is not done, in the words that the client gets.
pub(super) struct Refused(pub(super) String);

impl<E: std::error::Error> From<E> for Refused {
    fn from(error: E) -> Self {
        Self(error.to_string())
    }
}

/// Bytes of entries of metadata in one message; the first goes in whatever its size.
const PAGE_BYTES: usize = 256 << 10;

/// What a kind of request needs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Needs {
    /// Any lock.
    Lock,
    /// The right to change the layout; whoever has sealed it is told so.
    Layout,
    /// The same, of which a seal or a commit is the end.
    Writer,
    /// It is no request, or none for this place.
    Nothing,
}

fn needs(message: &Message) -> Needs {
    match message {
        Message::GetLockStateRequest(_)
        | Message::GetAllocationStateRequest(_)
        | Message::ExportAllocationRequest(_)
        | Message::GetAllocationRequest(_)
        | Message::ListAllocationsRequest(_)
        | Message::MetadataGetRequest(_)
        | Message::MetadataListRequest(_)
        | Message::GetStateHashRequest(_)
        | Message::BatchExportRequest(_)
        | Message::BatchMetadataGetRequest(_) => Needs::Lock,
        Message::AllocateRequest(_)
        | Message::FreeAllocationRequest(_)
        | Message::MetadataPutRequest(_)
        | Message::MetadataDeleteRequest(_)
        | Message::BatchAllocateRequest(_)
        | Message::BatchMetadataPutRequest(_) => Needs::Layout,
        Message::CommitRequest(_) | Message::CommitLayoutRequest(_) => Needs::Writer,
        _ => Needs::Nothing,
    }
}

fn is_batch(message: &Message) -> bool {
    matches!(
        message,
        Message::BatchAllocateRequest(_)
            | Message::BatchExportRequest(_)
            | Message::BatchMetadataPutRequest(_)
            | Message::BatchMetadataGetRequest(_)
    )
}

pub(super) fn described(allocation: &Allocation) -> GetAllocationResponse {
    GetAllocationResponse {
        allocation_id: allocation.id.to_string(),
        size: allocation.size as i64,
        aligned_size: allocation.aligned_size as i64,
        tag: allocation.tag.to_string(),
        layout_slot: allocation.slot as i64,
    }
}

impl Session {
    /// Does a request and answers it.
    ///
    /// # Errors
    /// [`End`], where the session ends with it.
    pub(super) fn request(&mut self, message: Message) -> Result<(), End> {
        if let Some(refused) = self.not_allowed(&message) {
            return self.refuse(refused);
        }
        match message {
            Message::CommitRequest(_) => self.commit(),
            Message::CommitLayoutRequest(_) => self.commit_layout(),
            Message::AllocateRequest(request) => self.allocate_one(&request),
            Message::BatchAllocateRequest(request) => self.allocate_many(&request),
            Message::ExportAllocationRequest(request) => self.export(&request.allocation_id),
            Message::BatchExportRequest(request) => self.export_many(&request.allocation_ids),
            Message::FreeAllocationRequest(request) => {
                let success = self.free(&request.allocation_id);
                self.answer(&FreeAllocationResponse { success })
            }
            Message::GetLockStateRequest(_) => {
                let lock = self.service.core().lock.snapshot();
                self.answer(&GetLockStateResponse {
                    state: lock.state.name().to_owned(),
                    has_rw_session: lock.has_writer,
                    ro_session_count: lock.readers as i64,
                    waiting_writers: lock.waiting_writers as i64,
                    committed: lock.committed,
                    is_ready: lock.is_ready(),
                    layout_committed: lock.layout_committed,
                })
            }
            Message::GetStateHashRequest(_) => {
                let memory_layout_hash = self.service.core().hash.clone();
                self.answer(&GetStateHashResponse { memory_layout_hash })
            }
            other => match self.of_layout(other) {
                Ok(answer) => self.answer(&answer),
                Err(Refused(error)) => self.refuse(error),
            },
        }
    }

    /// Requests that only look at the layout, or change nothing else.
    fn of_layout(&mut self, message: Message) -> Result<Message, Refused> {
        let limit = self.service.settings.max_metadata_bytes;
        let layout = || Arc::clone(&self.service.core().layout);
        Ok(match message {
            Message::GetAllocationStateRequest(_) => {
                GetAllocationStateResponse { allocation_count: layout().len() as i64 }.into()
            }
            Message::GetAllocationRequest(request) => {
                described(layout().get(&request.allocation_id)?).into()
            }
            Message::ListAllocationsRequest(request) => {
                let layout = layout();
                let allocations = layout.allocations(request.tag.as_deref()).map(described);
                ListAllocationsResponse { allocations: allocations.collect() }.into()
            }
            Message::MetadataGetRequest(request) => match layout().entry(&request.key) {
                Some(entry) => MetadataGetResponse {
                    found: true,
                    allocation_id: Some(entry.allocation_id.to_string()),
                    offset_bytes: Some(entry.offset_bytes as i64),
                    value: Some(entry.value.to_vec()),
                },
                None => MetadataGetResponse {
                    found: false,
                    allocation_id: None,
                    offset_bytes: None,
                    value: None,
                },
            }
            .into(),
            Message::MetadataListRequest(request) => {
                let layout = layout();
                let keys = layout.entries(&request.prefix, None).map(|(key, _)| key.to_owned());
                MetadataListResponse { keys: keys.collect() }.into()
            }
            Message::BatchMetadataGetRequest(request) => page(&layout(), &request).into(),
            Message::MetadataPutRequest(put) => {
                let mut core = self.service.core();
                let layout = Arc::make_mut(&mut core.layout);
                layout.target(&put.allocation_id, put.offset_bytes)?;
                layout.check_entries([(&*put.key, &*put.value)], limit)?;
                layout.put(&put.key, &put.allocation_id, put.offset_bytes, &put.value)?;
                MetadataPutResponse { success: true }.into()
            }
            Message::BatchMetadataPutRequest(request) => {
                let mut core = self.service.core();
                let layout = Arc::make_mut(&mut core.layout);
                for put in &request.entries {
                    layout.target(&put.allocation_id, put.offset_bytes)?;
                }
                let entries = request.entries.iter().map(|put| (&*put.key, &*put.value));
                layout.check_entries(entries, limit)?;
                for put in &request.entries {
                    layout.put(&put.key, &put.allocation_id, put.offset_bytes, &put.value)?;
                }
                BatchMetadataPutResponse { success: true }.into()
            }
            Message::MetadataDeleteRequest(request) => {
                let mut core = self.service.core();
                let deleted = Arc::make_mut(&mut core.layout).delete(&request.key);
                MetadataDeleteResponse { deleted }.into()
            }
            other => return Err(Refused(format!("Unknown request: {}", other.name()))),
        })
    }

    /// Why the session may not ask this, if it may not.
    fn not_allowed(&self, message: &Message) -> Option<String> {
        let name = message.name();
        if is_batch(message) && !self.batches {
            return Some(format!("{name} not allowed: the handshake did not ask for \"{BATCH}\""));
        }
        let allowed = match (needs(message), self.granted) {
            (Needs::Lock, _) => true,
            (Needs::Layout, Granted::RwData) => {
                return Some(format!(
                    "{name} not allowed: the layout is committed. Reconnect with RW to replace it."
                ));
            }
            (Needs::Layout | Needs::Writer, granted) => granted == Granted::Rw,
            (Needs::Nothing, _) => false,
        };
        if allowed {
            return None;
        }
        let session = match self.granted {
            Granted::Rw => "RW",
            Granted::Ro => "RO",
            Granted::RwData => "RW_DATA",
        };
        let state = self.service.core().lock.state().name();
        Some(format!("{name} not allowed for {session} session in state {state}"))
    }

    /// The state of everything, for who only looks.
    pub(super) fn runtime_state(&self) -> GetRuntimeStateResponse {
        let core = self.service.core();
        let lock = core.lock.snapshot();
        GetRuntimeStateResponse {
            state: lock.state.name().to_owned(),
            has_rw_session: lock.has_writer,
            ro_session_count: lock.readers as i64,
            waiting_writers: lock.waiting_writers as i64,
            committed: lock.committed,
            is_ready: lock.is_ready(),
            allocation_count: core.layout.len() as i64,
            memory_layout_hash: core.hash.clone(),
            layout_committed: lock.layout_committed,
        }
    }

    /// The hash of the layout as it is. Taken without the mutex: who asks is the only one who could
    /// change it.
    fn checked_hash(&self) -> Result<String, End> {
        let layout = Arc::clone(&self.service.core().layout);
        match layout.broken().into_iter().next() {
            Some(broken) => Err(End::Server(ServerError::Broken(broken))),
            None => Ok(layout.hash()),
        }
    }

    fn commit(&mut self) -> Result<(), End> {
        self.give_up_ahead();
        let hash = self.checked_hash()?;
        tracing::info!(session = self.id, hash, "layout committed");
        if !self.service.commit(self.id, hash) {
            return Err(End::Server(ServerError::Broken("a writer without its lock".to_owned())));
        }
        self.service.counters.commits.add(1);
        self.answer(&CommitResponse { success: true })?;
        Err(End::Done)
    }

    fn commit_layout(&mut self) -> Result<(), End> {
        self.give_up_ahead();
        // Nor is one made now: the session makes no more allocations.
        self.ahead.forget();
        let hash = self.checked_hash()?;
        if !self.service.seal(self.id, hash.clone()) {
            return Err(End::Server(ServerError::Broken("a writer without its lock".to_owned())));
        }
        self.granted = Granted::RwData;
        self.answer(&CommitLayoutResponse {
            success: true,
            memory_layout_hash: hash,
            granted_lock_type: Some(self.granted),
        })
    }

    /// Takes an allocation out and gives its memory back; false if there is none.
    pub(super) fn free(&mut self, id: &str) -> bool {
        let mut core = self.service.core();
        let gone = Arc::make_mut(&mut core.layout).remove(id).is_some();
        let extent = core.extents.remove(id);
        drop(core);
        self.service.memory.reclaim(extent.into_iter().collect());
        gone
    }
}

/// As many entries as fit into a message.
fn page(layout: &Layout, request: &BatchMetadataGetRequest) -> BatchMetadataGetResponse {
    let (mut entries, mut bytes) = (Vec::new(), 0);
    let mut rest = layout.entries(&request.prefix, request.after.as_deref()).peekable();
    while let Some((key, entry)) = rest.peek() {
        bytes += key.len() + entry.value.len() + entry.allocation_id.len() + 64;
        if bytes > PAGE_BYTES && !entries.is_empty() {
            break;
        }
        entries.push(MetadataItem {
            key: (*key).to_owned(),
            allocation_id: entry.allocation_id.to_string(),
            offset_bytes: entry.offset_bytes as i64,
            value: entry.value.to_vec(),
        });
        rest.next();
    }
    BatchMetadataGetResponse { entries, more: rest.peek().is_some() }
}
