//! Items: values and tensors survive, whatever their type; what torch does not write is refused.

use super::*;
use crate::FormatError;
use crate::error::FileError;
use crate::formats::checkpoint::Checkpoint as _;
use crate::plan::{Deduplicate, LocalPlan, plan_save};
use crate::reader::CheckpointReader;
use crate::storage::Durable;
use crate::storage::backend::Links;
use crate::storage::checked_directory::CheckedDirectory;
use crate::storage::location::Location;
use crate::storage::read_at::BlockReader;
use crate::torch::value::{decode_value, encode_value, value_item_length};
use crate::writer::{PayloadSource, RankItems, WriteOptions, finish, write_rank};
use fsdp_layout::{DType, PlainTensor, PlainValue, TensorBox};
use proptest::prelude::*;
use std::borrow::Cow;
use std::ops::Range;

/// Makes values of all types, nested in each other.
fn any_value() -> impl Strategy<Value = PlainValue> {
    let leaf = prop_oneof![
        Just(PlainValue::None),
        any::<bool>().prop_map(PlainValue::Bool),
        any::<i64>().prop_map(PlainValue::Int),
        (-300i64..300).prop_map(PlainValue::Int),
        any::<f64>().prop_map(PlainValue::Float),
        ".{0,20}".prop_map(PlainValue::Str),
        prop::collection::vec(any::<u8>(), 0..20).prop_map(PlainValue::Bytes),
        prop::collection::vec(any::<u8>(), 0..6).prop_map(|data| {
            PlainValue::Tensor(PlainTensor {
                dtype: DType::U8,
                shape: vec![data.len()],
                data,
            })
        }),
    ];
    leaf.prop_recursive(4, 64, 6, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(PlainValue::List),
            prop::collection::vec(inner.clone(), 0..6).prop_map(PlainValue::Tuple),
            prop::collection::vec(inner.clone(), 0..3).prop_map(PlainValue::Set),
            prop::collection::vec((inner.clone(), inner), 0..4).prop_map(PlainValue::Dict),
        ]
    })
}

proptest! {
    #[test]
    fn any_value_survives(value in any_value()) {
        let item = encode_value(&value).unwrap();
        prop_assert_eq!(item.len() as u64, value_item_length(&value).unwrap());
        prop_assert!(decode_value(&item).unwrap().same_bits(&value));
    }
}

#[test]
fn tensors_of_every_dtype_survive() {
    for &dtype in DType::ALL {
        for shape in [&[][..], &[0], &[3, 0, 2], &[5], &[2, 3], &[1, 1, 1]] {
            let Ok(item) = lay_out_tensor(dtype, shape) else {
                assert!(dtype.is_quantized() || !dtype.is_in_torch(), "{dtype}");
                continue;
            };
            let payload: Vec<u8> = (0..item.storage_length(0)).map(|i| i as u8).collect();
            let crc = crc32fast::hash(&payload);
            let bytes = [item.head(crc), payload.clone(), item.tail(&[crc])].concat();
            assert_eq!(item.head(crc).len() as u64, item.storage_offset(0));
            assert_eq!(bytes.len() as u64, item.length());
            let stored = StoredTensor::locate(&bytes).unwrap();
            assert_eq!(
                (stored.tensor.dtype, &stored.tensor.shape[..]),
                (dtype, shape)
            );
            assert_eq!(stored.storage_offset, item.storage_offset(0));
            let known = KnownItem::new(dtype, shape).unwrap();
            assert!(
                known.is_same(&ItemEnds::new(&bytes).unwrap()),
                "{dtype} {shape:?}"
            );
            assert_eq!(
                StoredTensor::locate_known(&bytes, Some(&known)).unwrap(),
                stored
            );
            let whole = TensorBox::whole(shape);
            let mut read = vec![0xee; payload.len()];
            let mut slot = Slot::new(whole.clone(), &mut read);
            stored
                .read(&mut BlockReader::new(&bytes), 0, &whole, &mut slot)
                .unwrap();
            assert_eq!(read, payload);
        }
    }
}

#[test]
fn a_large_item_is_known_by_its_ends() {
    let item = lay_out_tensor(DType::F32, &[5000]).unwrap();
    let known = KnownItem::new(DType::F32, &[5000]).unwrap();
    let crc = 0x0102_0304;
    let bytes = [item.head(crc), vec![7; 20_000], item.tail(&[crc])].concat();
    let ends = item.head(crc).len()..bytes.len() - item.tail(&[crc]).len();
    let located = StoredTensor::locate(&bytes).unwrap();
    assert!(known.is_same(&ItemEnds::new(&bytes).unwrap()));
    assert_eq!(
        StoredTensor::locate_known(&bytes, Some(&known)).unwrap(),
        located
    );
    for index in (0..ends.start).chain(ends.end..bytes.len()) {
        let mut changed = bytes.clone();
        changed[index] ^= 0x55;
        let known = StoredTensor::locate_known(&changed, Some(&known)).ok();
        assert_eq!(known, StoredTensor::locate(&changed).ok(), "byte {index}");
    }
    // A tensor of another shape with as many elements, and one of another type.
    for (dtype, shape) in [(DType::F32, &[50, 100][..]), (DType::I32, &[5000])] {
        let other = KnownItem::new(dtype, shape).unwrap();
        assert_eq!(
            StoredTensor::locate_known(&bytes, Some(&other)).unwrap(),
            located
        );
    }
}

/// An item whose payload is too large for memory: zeros between the bytes at its ends.
struct Sparse {
    head: Vec<u8>,
    payload: u64,
    tail: Vec<u8>,
}

impl ReadAt for Sparse {
    fn len(&self) -> u64 {
        self.head.len() as u64 + self.payload + self.tail.len() as u64
    }

    fn read_exact_at(&self, offset: u64, dst: &mut [u8]) -> Result<(), FormatError> {
        let tail_start = self.head.len() as u64 + self.payload;
        for (position, byte) in (offset..).zip(dst) {
            *byte = if let Some(byte) = self.head.get(position as usize) {
                *byte
            } else {
                position
                    .checked_sub(tail_start)
                    .map_or(0, |position| self.tail[position as usize])
            };
        }
        Ok(())
    }
}

#[test]
fn an_item_beyond_4_gib_is_known_by_its_ends() {
    // Its zip directory has the 64-bit fields of lengths and offsets.
    let (dtype, shape) = (DType::F32, [5 << 28]);
    let item = lay_out_tensor(dtype, &shape).unwrap();
    let known = KnownItem::new(dtype, &shape).unwrap();
    let crc = 0x0102_0304;
    let mut sparse = Sparse {
        head: item.head(crc),
        payload: item.storage_length(0),
        tail: item.tail(&[crc]),
    };
    let located = StoredTensor::locate(&sparse).unwrap();
    assert_eq!(
        (located.tensor.dtype, &located.tensor.shape[..]),
        (dtype, &shape[..])
    );
    assert!(known.is_same(&ItemEnds::new(&sparse).unwrap()));
    assert_eq!(
        StoredTensor::locate_known(&sparse, Some(&known)).unwrap(),
        located
    );
    for index in 0..sparse.tail.len() {
        sparse.tail[index] ^= 0x55;
        let known = StoredTensor::locate_known(&sparse, Some(&known)).ok();
        assert_eq!(
            known,
            StoredTensor::locate(&sparse).ok(),
            "byte {index} of the tail"
        );
        sparse.tail[index] ^= 0x55;
    }
}

/// Tensors of bytes that count from 0.
struct Counting;

impl PayloadSource for Counting {
    fn payload(
        &self,
        _: &str,
        _: &TensorBox,
        range: Range<u64>,
        sink: &mut dyn FnMut(&[u8]) -> Result<(), FileError>,
    ) -> Result<(), FileError> {
        let bytes: Vec<u8> = range.map(|index| index as u8).collect();
        sink(&bytes)
    }

    fn value(&self, _: &str) -> Result<Cow<'_, PlainValue>, FileError> {
        Ok(Cow::Owned(PlainValue::None))
    }
}

#[test]
fn items_in_a_file_with_hashes_are_known_by_their_ends() {
    // Lengths below and above those up to which items are read whole, and above the length of a
    // hash block.
    let lengths = [1, 1000, 5000, 100_000, 3 << 20];
    let mut plan = LocalPlan::default();
    for length in lengths {
        let whole = vec![TensorBox::whole(&[length])];
        plan.add_tensor(format!("of_{length}"), None, DType::U8, vec![length], whole);
    }
    let directory = tempfile::tempdir().unwrap();
    let saved = directory.path().join("saved");
    let global = plan_save(std::slice::from_ref(&plan), Deduplicate::default()).unwrap();
    let staging = Durable::new().prepare(&saved, false).unwrap();
    let items = RankItems {
        rank: 0,
        plan: &plan,
        selection: &global.selections[0],
        source: &Counting,
    };
    let written = write_rank(&staging, &items, &WriteOptions::default(), None);
    finish(staging, global.metadata, &[written.unwrap()], None).unwrap();

    let files =
        CheckedDirectory::open(&Location::from(saved.as_path()), true, Links::Refuse).unwrap();
    let reader = CheckpointReader::open(saved.as_path()).unwrap();
    let mut items = 0;
    for (fqn, bounds, stored) in reader.metadata().stored() {
        let file = files.file(&stored.relative_path).unwrap();
        assert!(
            file.block_at(stored.offset).is_some(),
            "{fqn}: its bytes have a hash"
        );
        let item = Window::new(&*file, stored.offset, stored.length).unwrap();
        let known = KnownItem::new(DType::U8, &bounds.unwrap().sizes).unwrap();
        assert!(known.is_same(&ItemEnds::new(&item).unwrap()), "{fqn}");
        items += 1;
    }
    assert!(items >= lengths.len(), "{items} items");
}

#[test]
fn lengths_need_no_data() {
    // 5 GiB, and a tensor larger than any file.
    let item = lay_out_tensor(DType::F32, &[5 << 28]).unwrap();
    assert_eq!(item.storage_length(0), 5 << 30);
    assert_eq!(
        item.head(0).len() as u64 + item.storage_length(0) + item.tail(&[0]).len() as u64,
        item.length()
    );
    assert!(matches!(
        lay_out_tensor(DType::F64, &[usize::MAX, 2]),
        Err(FormatError::Limit(_))
    ));
}

#[test]
fn every_prefix_and_every_flip_of_an_item_is_an_error_or_harmless() {
    let tensor = lay_out_tensor(DType::I16, &[2, 2]).unwrap();
    let known = KnownItem::new(DType::I16, &[2, 2]).unwrap();
    let payload = [1u8, 2, 3, 4, 5, 6, 7, 8];
    let crc = crc32fast::hash(&payload);
    let tensor = [tensor.head(crc), payload.to_vec(), tensor.tail(&[crc])].concat();
    let value = encode_value(&PlainValue::Tuple(vec![
        1.into(),
        "a".into(),
        PlainValue::List(vec![0.5.into()]),
    ]))
    .unwrap();
    for end in 0..tensor.len() {
        assert!(StoredTensor::locate(&tensor[..end].to_vec()).is_err());
    }
    for end in 0..value.len() {
        assert!(decode_value(&value[..end]).is_err());
    }
    for bit in 0..tensor.len() * 8 {
        let mut flipped = tensor.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        let located = StoredTensor::locate(&flipped);
        // Knowing the item changes nothing, whichever bit of it is another one.
        assert_eq!(
            StoredTensor::locate_known(&flipped, Some(&known)).ok(),
            located.as_ref().ok().cloned(),
            "bit {bit}"
        );
        if let Ok(stored) = located {
            let whole = TensorBox::whole(&stored.tensor.shape);
            let mut dst = vec![0; whole.numel() * stored.tensor.dtype.size_in_bytes() as usize];
            let mut slot = Slot::new(whole.clone(), &mut dst);
            let _ = stored.read(&mut BlockReader::new(&flipped), 0, &whole, &mut slot);
        }
    }
    for bit in 0..value.len() * 8 {
        let mut flipped = value.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        let _ = decode_value(&flipped);
    }
}
