//! The memory of one GPU: host memory whose addresses only this library can follow.

#![expect(
    unsafe_code,
    reason = "memory that kernels of several streams use at once, as on a GPU"
)]

use std::collections::BTreeMap;
use std::sync::Mutex;

use memmap2::{MmapMut, MmapOptions};

use crate::handles::lock;

/// An address in a GPU's memory.
pub(crate) type Address = u64;

/// The bit that makes an address one that no program of the host can follow.
const MARK: u64 = 1 << 62;
/// The bits of an address below the number of its GPU.
const OFFSET_BITS: u32 = 44;
/// The alignment of every allocation.
const ALIGNMENT: u64 = 256;
/// The byte that memory is filled with before it is used, and after that.
const POISON: u8 = 0xff;

/// Returns the number of the GPU that an address belongs to; `None` for addresses of the host.
pub(crate) fn device_of(address: Address) -> Option<usize> {
    (address & MARK != 0)
        .then(|| usize::try_from((address & !MARK) >> OFFSET_BITS).ok())
        .flatten()
}

/// The memory of one GPU.
#[derive(Debug)]
pub(crate) struct Memory {
    /// The address of its first byte.
    start: Address,
    base: *mut u8,
    _map: MmapMut,
    /// `true` if memory that nobody may use, or has written yet, is filled with [`POISON`].
    is_poisoned: bool,
    blocks: Mutex<Blocks>,
}

// SAFETY: the pages stay where they are for as long as the value lives, and `blocks` is behind a
// lock.
unsafe impl Send for Memory {}
// SAFETY: as above; kernels use the bytes through raw pointers only.
unsafe impl Sync for Memory {}

/// The used and free parts, by offset, with their lengths.
#[derive(Debug)]
struct Blocks {
    used: BTreeMap<u64, u64>,
    free: BTreeMap<u64, u64>,
}

impl Memory {
    /// Makes the memory of the GPU with this number.
    pub(crate) fn new(device: usize, capacity: u64, is_poisoned: bool) -> Result<Memory, String> {
        let len = usize::try_from(capacity).map_err(|error| error.to_string())?;
        let mut map = MmapOptions::new()
            .len(len)
            .no_reserve_swap()
            .map_anon()
            .map_err(|error| error.to_string())?;
        let blocks = Blocks {
            used: BTreeMap::new(),
            free: BTreeMap::from([(0, capacity)]),
        };
        let start = MARK | (device as u64) << OFFSET_BITS;
        Ok(Memory {
            start,
            base: map.as_mut_ptr(),
            _map: map,
            is_poisoned,
            blocks: Mutex::new(blocks),
        })
    }

    /// Takes memory; `None` if no free part is long enough.
    pub(crate) fn allocate(&self, bytes: u64) -> Option<Address> {
        let needed = bytes.checked_next_multiple_of(ALIGNMENT)?;
        let mut blocks = lock(&self.blocks);
        let (&offset, &len) = blocks.free.iter().find(|&(_, &len)| len >= needed)?;
        blocks.free.remove(&offset);
        if len > needed {
            blocks.free.insert(offset + needed, len - needed);
        }
        blocks.used.insert(offset, bytes);
        drop(blocks);
        // What is behind the bytes that were asked for shows, once they are freed, whether somebody
        // has written there.
        self.poison(offset, needed);
        Some(self.start + offset)
    }

    /// Fills memory that nobody may use now, or has written yet.
    fn poison(&self, offset: u64, bytes: u64) {
        if !self.is_poisoned {
            return;
        }
        // SAFETY: these bytes are within the map.
        unsafe {
            self.base
                .add(offset as usize)
                .write_bytes(POISON, bytes as usize)
        };
    }

    /// Returns `true` for the address of an allocation.
    pub(crate) fn is_allocated(&self, address: Address) -> bool {
        lock(&self.blocks)
            .used
            .contains_key(&address.wrapping_sub(self.start))
    }

    /// Gives an allocation back, and returns its bytes.
    pub(crate) fn free(&self, address: Address) -> Result<u64, String> {
        let mut offset = address.wrapping_sub(self.start);
        let mut blocks = lock(&self.blocks);
        let bytes = blocks
            .used
            .remove(&offset)
            .ok_or_else(|| format!("{address:#x} is freed, and was not allocated"))?;
        let mut len = bytes.next_multiple_of(ALIGNMENT);
        // Kernels of libraries are not checked while they run.
        let rest = (offset + bytes) as usize..(offset + len) as usize;
        // SAFETY: these bytes are within the map, and belong to this allocation.
        if self.is_poisoned
            && rest
                .clone()
                .any(|at| unsafe { self.base.add(at).read() } != POISON)
        {
            return Err(format!(
                "{address:#x} has been written behind its {bytes} bytes"
            ));
        }
        // Whoever still uses it finds no values there.
        self.poison(offset, bytes);
        // Join it with the free parts on both sides.
        if let Some(after) = blocks.free.remove(&(offset + len)) {
            len += after;
        }
        let before = blocks
            .free
            .range(..offset)
            .next_back()
            .map(|(&start, &bytes)| (start, bytes));
        if let Some((start, before)) = before.filter(|(start, before)| start + before == offset) {
            offset = start;
            len += before;
        }
        blocks.free.insert(offset, len);
        Ok(bytes)
    }

    /// Returns the elements from an address to the end of its allocation.
    pub(crate) fn elements<T: Copy>(&self, address: Address) -> Result<Elements<T>, String> {
        let offset = address.wrapping_sub(self.start);
        let blocks = lock(&self.blocks);
        let block = blocks
            .used
            .range(..=offset)
            .next_back()
            .filter(|&(start, bytes)| offset <= start + bytes);
        let (start, bytes) =
            block.ok_or_else(|| format!("{address:#x} is used, and is not allocated"))?;
        if !offset.is_multiple_of(align_of::<T>() as u64) {
            return Err(format!(
                "{address:#x} is not aligned to {} bytes",
                align_of::<T>()
            ));
        }
        let len = (start + bytes - offset) as usize / size_of::<T>();
        // SAFETY: the offset is within the map.
        Ok(Elements {
            first: unsafe { self.base.add(offset as usize) }.cast(),
            len,
        })
    }
}

/// Elements in a GPU's memory, which may overlap with others.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Elements<T> {
    first: *mut T,
    len: usize,
}

// SAFETY: plain numbers. Streams that use the same ones at once get any of their values, as on a
// GPU.
unsafe impl<T: Copy> Send for Elements<T> {}

impl<T: Copy> Elements<T> {
    /// Returns these elements without those behind `len`.
    pub(crate) fn first(self, len: usize) -> Result<Self, String> {
        if len > self.len {
            Err(format!(
                "{len} elements are used where there are {}",
                self.len
            ))
        } else {
            Ok(Elements { len, ..self })
        }
    }

    /// Returns where the first element is on the host.
    pub(crate) const fn as_ptr(&self) -> *mut T {
        self.first
    }

    #[track_caller]
    pub(crate) fn get(&self, index: usize) -> T {
        assert!(
            index < self.len,
            "element {index} is read where there are {}",
            self.len
        );
        // SAFETY: within the allocation, and any bytes are a number.
        unsafe { self.first.add(index).read_volatile() }
    }

    #[track_caller]
    pub(crate) fn set(&self, index: usize, value: T) {
        assert!(
            index < self.len,
            "element {index} is written where there are {}",
            self.len
        );
        // SAFETY: within the allocation.
        unsafe { self.first.add(index).write_volatile(value) }
    }

    /// Returns a copy of all elements.
    pub(crate) fn to_vec(self) -> Vec<T> {
        let mut copy = Vec::with_capacity(self.len);
        // SAFETY: as many elements as there is room for, which are all set then.
        unsafe {
            self.first.copy_to(copy.as_mut_ptr(), self.len);
            copy.set_len(self.len);
        }
        copy
    }

    /// Writes elements of the host.
    pub(crate) fn fill_from(self, values: &[T]) -> Result<(), String> {
        let to = self.first(values.len())?;
        // SAFETY: as many elements as there are, and the host's memory is not a GPU's.
        unsafe { to.first.copy_from(values.as_ptr(), values.len()) };
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_poisoned_bounded_and_used_again() {
        let memory = Memory::new(1, 4096, true).unwrap();
        let first = memory.allocate(10).unwrap();
        let second = memory.allocate(1000).unwrap();
        assert_eq!(
            (device_of(first), device_of(second), device_of(0x7fff_0000)),
            (Some(1), Some(1), None)
        );
        assert!(memory.elements::<f32>(first).unwrap().get(1).is_nan());
        assert_eq!(memory.elements::<u8>(first).unwrap().to_vec(), [POISON; 10]);
        assert!(memory.elements::<f32>(first + 2).is_err());
        assert!(memory.elements::<u8>(first + 11).is_err());
        assert!(memory.elements::<u16>(first).unwrap().first(6).is_err());
        assert_eq!(memory.allocate(3000), None);
        memory.free(first).unwrap();
        assert!(memory.elements::<u8>(first).is_err() && memory.free(first).is_err());
        memory.free(second).unwrap();
        assert_eq!(memory.allocate(4096), Some(first));
    }

    #[test]
    fn what_is_written_behind_an_allocation_is_found_when_it_is_freed() {
        let memory = Memory::new(0, 4096, true).unwrap();
        let address = memory.allocate(20).unwrap();
        let first = memory.elements::<u8>(address).unwrap().as_ptr();
        // SAFETY: within the memory, though behind the allocation, as a kernel may write.
        unsafe { first.add(20).write(0) };
        assert!(
            memory
                .free(address)
                .unwrap_err()
                .contains("behind its 20 bytes")
        );
    }

    #[test]
    #[should_panic(expected = "element 5 is read where there are 5")]
    fn an_element_behind_an_allocation_is_not_read() {
        let memory = Memory::new(0, 4096, true).unwrap();
        let address = memory.allocate(20).unwrap();
        memory.elements::<f32>(address).unwrap().get(5);
    }
}
