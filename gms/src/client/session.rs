//! A connection with a lock: a method for each request.

use std::os::fd::OwnedFd;
use std::path::Path;

use super::ClientError;
use super::channel::{Channel, Interrupt, Waits};
use super::connect::{ConnectOptions, reach, unexpected};
use crate::lock::Granted;
use crate::socket::Signals;
use crate::wire::*;

type Result<T> = std::result::Result<T, ClientError>;

/// An allocation, as the server knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AllocationInfo {
    /// Its name.
    pub allocation_id: String,
    /// Bytes that were asked for.
    pub size: u64,
    /// Bytes that it has.
    pub aligned_size: u64,
    /// What it is for.
    pub tag: String,
    /// Its place in the layout.
    pub layout_slot: u64,
}

/// A number that the protocol signs though it is never negative.
fn unsigned(number: i64) -> Result<u64> {
    let found = || format!("the number {number}");
    number
        .try_into()
        .map_err(|_| ClientError::Unexpected { expected: "a number of bytes", found: found() })
}

impl TryFrom<GetAllocationResponse> for AllocationInfo {
    type Error = ClientError;

    fn try_from(allocation: GetAllocationResponse) -> Result<Self> {
        Ok(Self {
            allocation_id: allocation.allocation_id,
            size: unsigned(allocation.size)?,
            aligned_size: unsigned(allocation.aligned_size)?,
            tag: allocation.tag,
            layout_slot: unsigned(allocation.layout_slot)?,
        })
    }
}

/// What an entry of metadata holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetadataValue {
    /// The allocation that it is about.
    pub allocation_id: String,
    /// Where in the allocation.
    pub offset_bytes: u64,
    /// What the writer tells the readers of it.
    pub value: Vec<u8>,
}

/// A connection that has a lock. Dropping it gives the lock back; a writer's layout is void then.
///
/// Each method sends one request and waits for its answer, as long as
/// [`ConnectOptions::answer_timeout`] says, and fails with [`ClientError::Refused`] where the server would
/// not do it, or with what goes wrong with a connection; the session is of no further use after the
/// latter. In a child of the process each fails with [`ClientError::Forked`], and asks nothing.
#[derive(Debug)]
pub struct Session {
    channel: Channel,
    granted: Granted,
    committed: bool,
    batches: bool,
}

/// Asks, and takes the answer apart.
macro_rules! ask {
    ($session:expr, $request:expr, $answer:ident) => {
        ask!($session, $request, $answer, Waits::Not)
    };
    ($session:expr, $request:expr, $answer:ident, $waits:expr) => {
        match $session.channel.call(&$request, 0, $waits)?.0 {
            Message::$answer(answer) => answer,
            other => return Err(unexpected(stringify!($answer), other)),
        }
    };
}

impl Session {
    /// Connects and waits for the lock.
    ///
    /// # Errors
    /// [`ClientError::Connect`], [`ClientError::LockTimeout`], [`ClientError::Interrupted`],
    /// [`ClientError::Silent`], [`ClientError::Replaced`], and what goes wrong with connections.
    pub fn connect(path: impl AsRef<Path>, options: ConnectOptions) -> Result<Self> {
        Self::connect_by(path.as_ref(), options, None)
    }

    /// The same, where somebody may say that all this takes too long.
    pub(super) fn connect_by(
        path: &Path,
        options: ConnectOptions,
        interrupt: Option<&Interrupt>,
    ) -> Result<Self> {
        let signals = match interrupt {
            Some(interrupt) => interrupt.signals(),
            None if options.interruptible => Signals::End,
            None => Signals::Ignored,
        };
        let reached = reach(path, options.timeout, signals)?;
        let mut channel = Channel::new(reached, path.into(), options.spin, options.answer_timeout);
        let extensions = if options.batch { vec![BATCH.to_owned()] } else { Vec::new() };
        let handshake = HandshakeRequest {
            lock_type: options.lock,
            timeout_ms: options.timeout.map(|time| time.as_millis().try_into().unwrap_or(i64::MAX)),
            extensions: Extensions(extensions),
        };
        let waits = options.timeout.map_or(Waits::ForEver, Waits::For);
        match channel.begin(&handshake, waits, signals)? {
            Message::HandshakeResponse(HandshakeResponse {
                success: true,
                committed,
                granted_lock_type: Some(granted),
                extensions,
            }) => {
                let batches = options.batch && extensions.contains(BATCH);
                Ok(Self { channel, granted, committed, batches })
            }
            Message::HandshakeResponse(_) => Err(ClientError::LockTimeout),
            other => Err(unexpected("HandshakeResponse", other)),
        }
    }

    /// Has waits for answers end where somebody says so, [`ClientError::Interrupted`]: nobody, if nothing else
    /// is said. The server may do what it was asked for all the same.
    pub fn set_interrupt(&mut self, interrupt: Option<Interrupt>) {
        self.channel.set_interrupt(interrupt);
    }

    /// Whether the connection has failed: the server is gone, or was given up, or somebody has ended a wait. All
    /// that it is asked for since fails.
    pub fn is_broken(&self) -> bool {
        self.channel.is_broken()
    }

    /// Whether somebody has ended a wait: all that it is asked for since fails.
    pub fn is_interrupted(&self) -> bool {
        self.channel.is_interrupted()
    }

    /// The lock that it has.
    pub fn granted(&self) -> Granted {
        self.granted
    }

    /// Whether a layout was published when the lock was granted.
    pub fn committed(&self) -> bool {
        self.committed
    }

    /// Whether the server takes batches.
    pub fn batches(&self) -> bool {
        self.batches
    }

    /// Makes an allocation.
    pub fn allocate(&mut self, size: u64, tag: &str) -> Result<AllocationInfo> {
        let size = i64::try_from(size).map_err(|_| ClientError::Size { bytes: size })?;
        let request = AllocateRequest { size, tag: tag.to_owned() };
        let made = ask!(self, request, AllocateResponse, Waits::ForEver);
        Ok(AllocationInfo {
            allocation_id: made.allocation_id,
            size: unsigned(made.size)?,
            aligned_size: unsigned(made.aligned_size)?,
            tag: request.tag,
            layout_slot: unsigned(made.layout_slot)?,
        })
    }

    /// A descriptor of an allocation's memory.
    pub fn export(&mut self, allocation_id: &str) -> Result<(AllocationInfo, OwnedFd)> {
        let request = ExportAllocationRequest { allocation_id: allocation_id.to_owned() };
        let (answer, mut files) = self.channel.call(&request, 1, Waits::Not)?;
        match (answer, files.pop()) {
            (Message::ExportAllocationResponse(about), Some(file)) => {
                let about = AllocationInfo {
                    allocation_id: about.allocation_id,
                    size: unsigned(about.size)?,
                    aligned_size: unsigned(about.aligned_size)?,
                    tag: about.tag,
                    layout_slot: unsigned(about.layout_slot)?,
                };
                Ok((about, file))
            }
            (other, _) => Err(unexpected("ExportAllocationResponse", other)),
        }
    }

    /// An allocation.
    pub fn get(&mut self, allocation_id: &str) -> Result<AllocationInfo> {
        let request = GetAllocationRequest { allocation_id: allocation_id.to_owned() };
        ask!(self, request, GetAllocationResponse).try_into()
    }

    /// All allocations, or those of a tag, in the order of their slots.
    pub fn list(&mut self, tag: Option<&str>) -> Result<Vec<AllocationInfo>> {
        let request = ListAllocationsRequest { tag: tag.map(str::to_owned) };
        let answer = ask!(self, request, ListAllocationsResponse);
        answer.allocations.into_iter().map(AllocationInfo::try_from).collect()
    }

    /// Gives an allocation back, with the metadata about it; false if there was none.
    pub fn free(&mut self, allocation_id: &str) -> Result<bool> {
        let request = FreeAllocationRequest { allocation_id: allocation_id.to_owned() };
        Ok(ask!(self, request, FreeAllocationResponse).success)
    }

    /// How many allocations there are.
    pub fn allocation_count(&mut self) -> Result<u64> {
        unsigned(
            ask!(self, GetAllocationStateRequest {}, GetAllocationStateResponse).allocation_count,
        )
    }

    /// The state of the lock.
    pub fn lock_state(&mut self) -> Result<GetLockStateResponse> {
        Ok(ask!(self, GetLockStateRequest {}, GetLockStateResponse))
    }

    /// The hash of the published or sealed layout; empty where there is none.
    pub fn layout_hash(&mut self) -> Result<String> {
        Ok(ask!(self, GetStateHashRequest {}, GetStateHashResponse).memory_layout_hash)
    }

    /// Puts an entry of metadata.
    pub fn metadata_put(
        &mut self,
        key: &str,
        allocation_id: &str,
        offset_bytes: u64,
        value: &[u8],
    ) -> Result<()> {
        let request = MetadataPutRequest {
            key: key.to_owned(),
            allocation_id: allocation_id.to_owned(),
            offset_bytes: i64::try_from(offset_bytes)
                .map_err(|_| ClientError::Size { bytes: offset_bytes })?,
            value: value.to_vec(),
        };
        ask!(self, request, MetadataPutResponse);
        Ok(())
    }

    /// An entry of metadata, if there is one.
    pub fn metadata_get(&mut self, key: &str) -> Result<Option<MetadataValue>> {
        match ask!(self, MetadataGetRequest { key: key.to_owned() }, MetadataGetResponse) {
            MetadataGetResponse { found: false, .. } => Ok(None),
            MetadataGetResponse {
                allocation_id: Some(allocation_id),
                offset_bytes: Some(offset),
                value: Some(value),
                ..
            } => Ok(Some(MetadataValue { allocation_id, offset_bytes: unsigned(offset)?, value })),
            _ => Err(ClientError::Unexpected {
                expected: "an entry of metadata",
                found: "half of one".to_owned(),
            }),
        }
    }

    /// Takes an entry away; false if there was none.
    pub fn metadata_delete(&mut self, key: &str) -> Result<bool> {
        let request = MetadataDeleteRequest { key: key.to_owned() };
        Ok(ask!(self, request, MetadataDeleteResponse).deleted)
    }

    /// The names of entries that begin so, sorted.
    pub fn metadata_list(&mut self, prefix: &str) -> Result<Vec<String>> {
        let request = MetadataListRequest { prefix: prefix.to_owned() };
        Ok(ask!(self, request, MetadataListResponse).keys)
    }

    /// Publishes the layout and ends the session. Whoever reads may come in as this returns: all work
    /// that writes the memory must have ended before.
    pub fn commit(mut self) -> Result<()> {
        ask!(self, CommitRequest {}, CommitResponse);
        Ok(())
    }

    /// Seals the layout, so that it outlives this session: from now on only contents may be written.
    /// The hash comes back.
    pub fn commit_layout(&mut self) -> Result<String> {
        let sealed = ask!(self, CommitLayoutRequest {}, CommitLayoutResponse);
        if let Some(granted) = sealed.granted_lock_type {
            self.granted = granted;
        }
        Ok(sealed.memory_layout_hash)
    }

    /// What the batch extension's requests use.
    pub(super) fn channel(&mut self) -> &mut Channel {
        &mut self.channel
    }
}
