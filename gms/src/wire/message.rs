//! Every message of the protocol, and those of its batch extension.

use super::define::{Encode, body, messages, sealed, type_of};
use super::field::{Extensions, Field, Item};
use super::pack::Packer;
use super::unpack::{DecodeError, Unpacker};
use crate::lock::{Granted, Requested};

/// The name of the extension with the `Batch…` messages, in a handshake.
pub const BATCH: &str = "batch";

/// The most descriptors that one message can have beside it: the kernel's limit.
pub const MAX_DESCRIPTORS: usize = 253;

messages! {
    /// The first message of a session: asks for a lock.
    HandshakeRequest = "handshake_request" {
        /// Which lock.
        lock_type: Requested,
        /// How long to wait for it; for ever if not said.
        timeout_ms: Option<i64> = None,
        /// Extensions that the client can do.
        extensions: Extensions = Extensions::default(),
    }
    /// The answer: the lock, or that the time was up.
    HandshakeResponse = "handshake_response" {
        /// Whether there is a lock.
        success: bool,
        /// Whether a committed layout was there once the lock was granted.
        committed: bool,
        /// Which lock was granted.
        granted_lock_type: Option<Granted> = None,
        /// The extensions that were asked for and that the server can do, too.
        extensions: Extensions = Extensions::default(),
    }
    /// Publishes the layout and ends the session.
    CommitRequest = "commit_request" {}
    /// It is published.
    CommitResponse = "commit_response" {
        /// True.
        success: bool,
    }
    /// Seals the shape of the layout: from then on only contents change.
    CommitLayoutRequest = "commit_layout_request" {}
    /// It is sealed.
    CommitLayoutResponse = "commit_layout_response" {
        /// True.
        success: bool,
        /// The layout's hash.
        memory_layout_hash: String = String::new(),
        /// What the session may do from now on.
        granted_lock_type: Option<Granted> = None,
    }
    /// Asks for the state of the lock.
    GetLockStateRequest = "get_lock_state_request" {}
    /// The state of the lock.
    GetLockStateResponse = "get_lock_state_response" {
        /// Its name.
        state: String,
        /// Whether there is a writer.
        has_rw_session: bool,
        /// How many readers there are.
        ro_session_count: i64,
        /// How many writers wait.
        waiting_writers: i64,
        /// Whether a layout is published.
        committed: bool,
        /// Whether one is published and nobody is replacing it.
        is_ready: bool,
        /// Whether the layout's shape is sealed.
        layout_committed: bool = false,
    }
    /// Asks how many allocations there are.
    GetAllocationStateRequest = "get_allocation_state_request" {}
    /// How many allocations there are.
    GetAllocationStateResponse = "get_allocation_state_response" {
        /// So many.
        allocation_count: i64,
    }
    /// Asks for memory.
    AllocateRequest = "allocate_request" {
        /// Bytes.
        size: i64,
        /// What it is for.
        tag: String = "default".to_owned(),
    }
    /// An allocation was made.
    AllocateResponse = "allocate_response" {
        /// Its name from now on.
        allocation_id: String,
        /// Bytes that were asked for.
        size: i64,
        /// Bytes that it has: whole granules.
        aligned_size: i64,
        /// Its place in the layout.
        layout_slot: i64,
    }
    /// Asks for a descriptor of an allocation's memory.
    ExportAllocationRequest = "export_allocation_request" {
        /// Which.
        allocation_id: String,
    }
    /// An allocation; the descriptor is beside the message.
    ExportAllocationResponse = "export_allocation_response" {
        /// Its name.
        allocation_id: String,
        /// Bytes that were asked for.
        size: i64,
        /// Bytes that it has.
        aligned_size: i64,
        /// What it is for.
        tag: String,
        /// Its place in the layout.
        layout_slot: i64,
    }
    /// Asks about an allocation.
    GetAllocationRequest = "get_allocation_request" {
        /// Which.
        allocation_id: String,
    }
    /// An allocation.
    GetAllocationResponse = "get_allocation_response" {
        /// Its name.
        allocation_id: String,
        /// Bytes that were asked for.
        size: i64,
        /// Bytes that it has.
        aligned_size: i64,
        /// What it is for.
        tag: String,
        /// Its place in the layout.
        layout_slot: i64,
    }
    /// Asks for all allocations, or those of a tag.
    ListAllocationsRequest = "list_allocations_request" {
        /// The tag.
        tag: Option<String> = None,
    }
    /// Allocations in the order of their slots.
    ListAllocationsResponse = "list_allocations_response" {
        /// These.
        allocations: Vec<GetAllocationResponse> = Vec::new(),
    }
    /// Gives an allocation back.
    FreeAllocationRequest = "free_allocation_request" {
        /// Which.
        allocation_id: String,
    }
    /// Whether there was such an allocation.
    FreeAllocationResponse = "free_allocation_response" {
        /// It is gone now.
        success: bool,
    }
    /// Why a request was not done.
    ErrorResponse = "error_response" {
        /// In words.
        error: String,
        /// 0.
        code: i64 = 0,
    }
    /// Puts an entry into the table of metadata, or another in its place.
    MetadataPutRequest = "metadata_put_request" {
        /// Its name.
        key: String,
        /// The allocation that it is about.
        allocation_id: String,
        /// Where in the allocation.
        offset_bytes: i64,
        /// What the writer tells the readers of it.
        value: Vec<u8>,
    }
    /// It is there.
    MetadataPutResponse = "metadata_put_response" {
        /// True.
        success: bool,
    }
    /// Asks for an entry.
    MetadataGetRequest = "metadata_get_request" {
        /// Its name.
        key: String,
    }
    /// An entry, if there is one.
    MetadataGetResponse = "metadata_get_response" {
        /// Whether there is.
        found: bool,
        /// The allocation that it is about.
        allocation_id: Option<String> = None,
        /// Where in the allocation.
        offset_bytes: Option<i64> = None,
        /// What the writer tells of it.
        value: Option<Vec<u8>> = None,
    }
    /// Takes an entry away.
    MetadataDeleteRequest = "metadata_delete_request" {
        /// Its name.
        key: String,
    }
    /// Whether there was such an entry.
    MetadataDeleteResponse = "metadata_delete_response" {
        /// It is gone now.
        deleted: bool,
    }
    /// Asks for the names of entries.
    MetadataListRequest = "metadata_list_request" {
        /// What they begin with.
        prefix: String = String::new(),
    }
    /// Names of entries, sorted.
    MetadataListResponse = "metadata_list_response" {
        /// These.
        keys: Vec<String> = Vec::new(),
    }
    /// Asks for the hash of the published layout.
    GetStateHashRequest = "get_memory_layout_hash_request" {}
    /// The hash of the published layout.
    GetStateHashResponse = "get_memory_layout_hash_response" {
        /// In hexadecimal; empty where no layout is published or sealed.
        memory_layout_hash: String,
    }
    /// Instead of a handshake: asks for the state of everything.
    GetRuntimeStateRequest = "get_runtime_state_request" {}
    /// The state of everything.
    GetRuntimeStateResponse = "get_runtime_state_response" {
        /// The lock's.
        state: String,
        /// Whether there is a writer.
        has_rw_session: bool,
        /// How many readers there are.
        ro_session_count: i64,
        /// How many writers wait.
        waiting_writers: i64,
        /// Whether a layout is published.
        committed: bool,
        /// Whether one is published and nobody is replacing it.
        is_ready: bool,
        /// How many allocations there are.
        allocation_count: i64 = 0,
        /// The layout's hash.
        memory_layout_hash: String = String::new(),
        /// Whether the layout's shape is sealed.
        layout_committed: bool = false,
    }
    /// Instead of a handshake: asks for what has happened.
    GetEventHistoryRequest = "get_event_history_request" {}
    /// What has happened last.
    GetEventHistoryResponse = "get_event_history_response" {
        /// Oldest first.
        events: Vec<RuntimeEvent>,
    }
    /// Asks for several allocations of a tag. All are made, or none.
    BatchAllocateRequest = "batch_allocate_request" {
        /// Bytes of each.
        sizes: Vec<i64>,
        /// What they are for.
        tag: String = "default".to_owned(),
        /// Whether their descriptors are wanted at once: for at most [`MAX_DESCRIPTORS`].
        export: bool = false,
    }
    /// Allocations that were made, with their descriptors beside them if these were asked for.
    BatchAllocateResponse = "batch_allocate_response" {
        /// In the order of the sizes.
        allocations: Vec<GetAllocationResponse>,
    }
    /// Asks for the descriptors of several allocations, at most [`MAX_DESCRIPTORS`].
    BatchExportRequest = "batch_export_request" {
        /// Which.
        allocation_ids: Vec<String>,
    }
    /// Allocations with their descriptors beside them.
    BatchExportResponse = "batch_export_response" {
        /// In the order that they were asked for.
        allocations: Vec<GetAllocationResponse>,
    }
    /// Puts several entries. All are put, or none.
    BatchMetadataPutRequest = "batch_metadata_put_request" {
        /// These.
        entries: Vec<MetadataItem>,
    }
    /// They are there.
    BatchMetadataPutResponse = "batch_metadata_put_response" {
        /// True.
        success: bool,
    }
    /// Asks for entries with their values.
    BatchMetadataGetRequest = "batch_metadata_get_request" {
        /// What their names begin with.
        prefix: String = String::new(),
        /// The name after which to begin.
        after: Option<String> = None,
    }
    /// Entries in the order of their names: as many as fit into a message.
    BatchMetadataGetResponse = "batch_metadata_get_response" {
        /// These.
        entries: Vec<MetadataItem>,
        /// Whether there are more behind the last.
        more: bool,
    }
}

impl Item for GetAllocationResponse {}

/// Something that happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuntimeEvent {
    /// What.
    pub kind: String,
    /// To how many allocations.
    pub allocation_count: i64,
}

body!(RuntimeEvent, None, { kind: String, allocation_count: i64 = 0 });
impl Item for RuntimeEvent {}

/// One entry of the table of metadata.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetadataItem {
    /// Its name.
    pub key: String,
    /// The allocation that it is about.
    pub allocation_id: String,
    /// Where in the allocation.
    pub offset_bytes: i64,
    /// What the writer tells the readers of it.
    pub value: Vec<u8>,
}

body!(MetadataItem, None, {
    key: String,
    allocation_id: String,
    offset_bytes: i64,
    value: Vec<u8>
});
impl Item for MetadataItem {}
