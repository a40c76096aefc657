//! Virtual addresses: reservations and what is mapped where.
//!
//! The mapping table is the truth, and device work goes through it to the physical side of the
//! simulator's files; no mapping has pages of its own in the host's address space. So two
//! mappings of one extent are the same bytes by construction, tens of thousands of mappings
//! cost a table entry each and not one of the host's `vm.max_map_count`, and address space is
//! handed out in a fixed order, which makes a run repeatable. The addresses lie where the host
//! can have no memory: reading one on the host faults, as with a real device address.

use std::collections::BTreeMap;

use cuda_sys::types::CUresult;
use smallvec::SmallVec;

use crate::race::{Clock, PhysicalId, StreamKey};
use crate::ranges::Ranges;

/// Where device addresses begin: above all addresses that the host can use.
#[cfg(target_arch = "x86_64")]
pub(crate) const BASE: u64 = 1 << 47;
/// Where device addresses begin: above all addresses that the host can use.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) const BASE: u64 = 1 << 48;
/// A reservation of 64 TiB fits and one of 100 TiB does not, as on an H200.
const SIZE: u64 = 96 << 40;
/// Reservations are multiples of this and aligned to it.
pub(crate) const RESERVATION_UNIT: u64 = 2 << 20;

/// Who may edit a range of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    /// The caller, by cuMemAddressReserve and cuMemMap.
    Caller,
    /// The driver: memory of cuMemAlloc and of the memory pools.
    Driver,
}

#[derive(Debug)]
struct Reservation {
    size: u64,
    owner: Owner,
    mappings: u64,
}

/// An extent at an address.
#[derive(Debug)]
pub(crate) struct Mapping {
    pub(crate) size: u64,
    pub(crate) physical: PhysicalId,
    /// The handle that was mapped; 0 for the driver's own memory.
    pub(crate) handle: u64,
    /// Its place among all mappings ever made, and changes of rights.
    pub(crate) generation: u64,
    access: AccessRights,
    /// Since when each party has the rights that it has.
    opened: SmallVec<[Opened; 1]>,
    /// The last work of each stream that went through this address.
    users: SmallVec<[User; 2]>,
}

/// Since which change of mappings a party may read, and write.
#[derive(Clone, Copy, Debug)]
struct Opened {
    party: usize,
    read: u64,
    write: u64,
}

/// Work that went through a mapping.
#[derive(Clone, Copy, Debug)]
struct User {
    stream: StreamKey,
    tick: u64,
    /// By right of which device.
    device: usize,
}

/// Two bits for each party: read, and write. A party is a device by its index, or the [`HOST`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct AccessRights(u128);

/// The most devices that [`AccessRights`] can tell apart.
pub(crate) const MAX_DEVICES: usize = 32;

/// The host, where a device's index would stand: as an owner of memory, and of rights to it.
pub(crate) const HOST: usize = MAX_DEVICES;

impl AccessRights {
    const READ: u64 = 1;
    const WRITE: u64 = 2;

    /// The rights with those of one party replaced; `flags` as the driver counts them: 0 none,
    /// 1 read, 3 read and write.
    pub(crate) fn with(self, party: usize, flags: u64) -> Self {
        Self((self.0 & !(3 << (2 * party))) | (u128::from(flags) << (2 * party)))
    }

    /// The rights of a party as the driver counts them.
    pub(crate) fn of(self, party: usize) -> u64 {
        (self.0 >> (2 * party)) as u64 & 3
    }

    pub(crate) fn allows(self, party: usize, write: bool) -> bool {
        let needed = if write { Self::READ | Self::WRITE } else { Self::READ };
        self.of(party) & needed == needed
    }

    /// How many devices have rights.
    pub(crate) fn devices(self) -> usize {
        (0..MAX_DEVICES).filter(|device| self.of(*device) != 0).count()
    }

    /// The parties that have rights which they had not in `old`, and which: 1 read, 2 write.
    fn gained_since(self, old: Self) -> impl Iterator<Item = (usize, u64)> {
        let mut gained = Self(self.0 & !old.0);
        std::iter::from_fn(move || {
            let party = (gained.0 != 0).then(|| gained.0.trailing_zeros() as usize / 2)?;
            let rights = gained.of(party);
            gained = gained.with(party, 0);
            Some((party, rights))
        })
    }

    /// Whether every right that a party has in `self` it has in `new` too.
    fn kept_by(self, new: Self, party: usize) -> bool {
        self.of(party) & !new.of(party) == 0
    }
}

impl Mapping {
    pub(crate) fn access(&self) -> AccessRights {
        self.access
    }

    fn set_access(&mut self, access: AccessRights, generation: u64) {
        for (party, rights) in access.gained_since(self.access) {
            let known = self.opened.iter().position(|opened| opened.party == party);
            let at = known.unwrap_or_else(|| {
                self.opened.push(Opened { party, read: 0, write: 0 });
                self.opened.len() - 1
            });
            let opened = &mut self.opened[at];
            if rights & AccessRights::READ != 0 {
                opened.read = generation;
            }
            if rights & AccessRights::WRITE != 0 {
                opened.write = generation;
            }
        }
        self.access = access;
    }

    /// Whether a party got a right that it has now after a change of mappings.
    pub(crate) fn was_opened_after(&self, party: usize, write: bool, generation: u64) -> bool {
        let mut opened = self.opened.iter().filter(|opened| opened.party == party);
        opened.any(|opened| generation < if write { opened.write } else { opened.read })
    }

    pub(crate) fn used_by(&mut self, stream: StreamKey, tick: u64, device: usize) {
        let same = |user: &&mut User| user.stream == stream && user.device == device;
        match self.users.iter_mut().find(same) {
            Some(user) => user.tick = tick,
            None => self.users.push(User { stream, tick, device }),
        }
    }

    /// A stream whose work through this address the host has not seen complete.
    fn unfinished(&self, host: &Clock) -> Option<StreamKey> {
        self.unfinished_where(host, |_| true)
    }

    /// The same, of work by right of some devices.
    fn unfinished_where(&self, host: &Clock, of: impl Fn(usize) -> bool) -> Option<StreamKey> {
        let late = |user: &&User| host.get(user.stream) < user.tick && of(user.device);
        self.users.iter().find(late).map(|user| user.stream)
    }
}

/// What an edit of mappings did that a real driver would not have survived.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct InUse {
    pub(crate) address: u64,
    pub(crate) stream: StreamKey,
}

/// Why an edit did not happen.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    Code(CUresult),
    InUse(InUse),
}

impl From<CUresult> for Refused {
    fn from(code: CUresult) -> Self {
        Self::Code(code)
    }
}

const INVALID: Refused = Refused::Code(CUresult::CUDA_ERROR_INVALID_VALUE);

/// One machine's device address space.
#[derive(Debug)]
pub(crate) struct AddressSpace {
    free: Ranges,
    reservations: BTreeMap<u64, Reservation>,
    mappings: BTreeMap<u64, Mapping>,
    caller_reservations: usize,
    caller_mappings: usize,
    generation: u64,
}

impl AddressSpace {
    pub(crate) fn new() -> Self {
        Self {
            free: Ranges::new(BASE, SIZE),
            reservations: BTreeMap::new(),
            mappings: BTreeMap::new(),
            caller_reservations: 0,
            caller_mappings: 0,
            generation: 0,
        }
    }

    /// How many mappings were ever made or opened: work that is enqueued now knows no later ones.
    pub(crate) fn generation(&self) -> u64 {
        self.generation
    }

    /// Reservations that the caller made and did not free.
    pub(crate) fn caller_reservations(&self) -> usize {
        self.caller_reservations
    }

    /// Mappings that the caller made and did not undo.
    pub(crate) fn caller_mappings(&self) -> usize {
        self.caller_mappings
    }

    /// Reserves `size` bytes, at `hint` if that is free and aligned.
    pub(crate) fn reserve(
        &mut self,
        size: u64,
        align: u64,
        hint: u64,
        owner: Owner,
    ) -> Result<u64, CUresult> {
        let hinted = hint != 0 && hint.is_multiple_of(align) && self.free.take_at(hint, size);
        let start = if hinted {
            hint
        } else {
            self.free.take(size, align).ok_or(CUresult::CUDA_ERROR_OUT_OF_MEMORY)?
        };
        self.reservations.insert(start, Reservation { size, owner, mappings: 0 });
        self.caller_reservations += usize::from(owner == Owner::Caller);
        Ok(start)
    }

    /// Frees a whole reservation in which nothing is mapped.
    pub(crate) fn free(&mut self, start: u64, size: u64, owner: Owner) -> Result<(), CUresult> {
        match self.reservations.get(&start) {
            Some(r) if r.size == size && r.owner == owner && r.mappings == 0 => {}
            _ => return Err(CUresult::CUDA_ERROR_INVALID_VALUE),
        }
        self.reservations.remove(&start);
        self.caller_reservations -= usize::from(owner == Owner::Caller);
        self.free.give_back(start, size);
        Ok(())
    }

    /// The reservation that holds all of `start..start + size`: its start and size.
    pub(crate) fn reservation(&self, start: u64, size: u64) -> Option<(u64, u64, Owner)> {
        let (&at, r) = self.reservations.range(..=start).next_back()?;
        (start.checked_add(size)? <= at + r.size).then_some((at, r.size, r.owner))
    }

    /// Whether anything is mapped in `start..start + size`.
    pub(crate) fn any_mapped(&self, start: u64, size: u64) -> bool {
        let before = self.mappings.range(..start + size).next_back();
        before.is_some_and(|(&at, mapping)| at + mapping.size > start)
    }

    /// What is mapped in `start..start + size`, the mapping that holds its start included.
    pub(crate) fn mapped_in(&self, start: u64, size: u64) -> impl Iterator<Item = PhysicalId> + '_ {
        let first = self.mapping(start).map_or(start, |(at, _)| at);
        self.mappings.range(first..start + size).map(|(_, mapping)| mapping.physical)
    }

    /// Maps an extent over a free range of a reservation, with no rights for anyone.
    pub(crate) fn map(
        &mut self,
        start: u64,
        size: u64,
        physical: PhysicalId,
        handle: u64,
    ) -> Result<(), CUresult> {
        let (at, _, owner) =
            self.reservation(start, size).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        self.generation += 1;
        let mapping = Mapping {
            size,
            physical,
            handle,
            generation: self.generation,
            access: AccessRights::default(),
            opened: SmallVec::new(),
            users: SmallVec::new(),
        };
        self.mappings.insert(start, mapping);
        if let Some(reservation) = self.reservations.get_mut(&at) {
            reservation.mappings += 1;
        }
        self.caller_mappings += usize::from(owner == Owner::Caller);
        Ok(())
    }

    /// Takes away every mapping in the range, which must not cut one in two. Holes are fine.
    ///
    /// With a host clock, mappings whose use the host has not seen complete are refused.
    pub(crate) fn unmap(
        &mut self,
        start: u64,
        size: u64,
        owner: Owner,
        host: Option<&Clock>,
    ) -> Result<Vec<(u64, Mapping)>, Refused> {
        let (at, _, holder) = self.reservation(start, size).ok_or(INVALID)?;
        if holder != owner {
            return Err(INVALID);
        }
        let end = start + size;
        let before = self.mappings.range(..start).next_back();
        if before.is_some_and(|(&at, mapping)| at + mapping.size > start) {
            return Err(INVALID);
        }
        for (&address, mapping) in self.mappings.range(start..end) {
            if address + mapping.size > end {
                return Err(INVALID);
            }
            if let Some(stream) = host.and_then(|host| mapping.unfinished(host)) {
                return Err(Refused::InUse(InUse { address, stream }));
            }
        }
        let mut gone = Vec::new();
        while let Some((&address, _)) = self.mappings.range(start..end).next() {
            if let Some(mapping) = self.mappings.remove(&address) {
                gone.push((address, mapping));
            }
        }
        if let Some(reservation) = self.reservations.get_mut(&at) {
            reservation.mappings -= gone.len() as u64;
        }
        if owner == Owner::Caller {
            self.caller_mappings -= gone.len();
        }
        Ok(gone)
    }

    /// Changes the rights of whole mappings that cover the range without holes; the sizes of
    /// those whose rights changed.
    pub(crate) fn set_access(
        &mut self,
        start: u64,
        size: u64,
        change: impl Fn(AccessRights) -> AccessRights,
        host: Option<&Clock>,
    ) -> Result<Vec<u64>, Refused> {
        let end = start.checked_add(size).ok_or(INVALID)?;
        let mut at = start;
        for (&address, mapping) in self.mappings.range(start..end) {
            if address != at || address + mapping.size > end {
                return Err(INVALID);
            }
            at += mapping.size;
            let (old, new) = (mapping.access, change(mapping.access));
            let narrower = |device: usize| !old.kept_by(new, device);
            let user = host.and_then(|host| mapping.unfinished_where(host, narrower));
            if let Some(stream) = user {
                return Err(Refused::InUse(InUse { address, stream }));
            }
        }
        if at != end || size == 0 {
            return Err(INVALID);
        }
        let mut changed = Vec::new();
        self.generation += 1;
        for (_, mapping) in self.mappings.range_mut(start..end) {
            let access = change(mapping.access);
            if access != mapping.access {
                changed.push(mapping.size);
                mapping.set_access(access, self.generation);
            }
        }
        Ok(changed)
    }

    /// The mapping that holds an address, with its start.
    pub(crate) fn mapping(&self, address: u64) -> Option<(u64, &Mapping)> {
        let (&start, mapping) = self.mappings.range(..=address).next_back()?;
        (address < start + mapping.size).then_some((start, mapping))
    }

    /// As [`Self::mapping`], to note a use.
    pub(crate) fn mapping_mut(&mut self, address: u64) -> Option<(u64, &mut Mapping)> {
        let (&start, mapping) = self.mappings.range_mut(..=address).next_back()?;
        (address < start + mapping.size).then_some((start, mapping))
    }
}
