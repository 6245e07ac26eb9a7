//! Files of NumPy and of llama.cpp.

use fsdp_formats::checkpoint::{Checkpoint, Format, open};
use fsdp_formats::digest::digest;
use fsdp_formats::reader::OpenOptions;
use fsdp_formats::{FileError, FormatError};
use fsdp_layout::with_causes;
use fsdp_layout::{DType, ErrorKind, Failure as _, PlainValue, TensorBox};
use fsdp_tools::convert::{Cast, Rename, View};
use fsdp_tools::diff::{DiffOptions, diff};
use fsdp_tools::verify::{Level, VerifyOptions, add_integrity, verify};

use crate::foreign::{assert_converts, differences, fixture, opened, refused};

fn numpy_gguf(name: &str) -> Box<dyn Checkpoint> {
    opened(&fixture("numpy_gguf").join(name))
}

#[test]
fn arrays_of_numpy_are_tensors() {
    let arrays = numpy_gguf("arrays.npz");
    assert_eq!(arrays.format(), Format::Numpy);
    assert_eq!(differences(&*arrays, &*numpy_gguf("arrays.pt")), [""; 0]);
    assert_converts(&*arrays);
    // One array has the name of its file, and the layout of Fortran reads as that of C.
    let one = numpy_gguf("one.npy");
    let whole = TensorBox::whole(&[2, 3, 5]);
    let (mut a, mut b) = (vec![0; 240], vec![1; 240]);
    one.read_box("one", &whole, &mut a).unwrap();
    arrays.read_box("fortran", &whole, &mut b).unwrap();
    assert_eq!(a, b);
}

#[test]
fn compressed_arrays_are_read_in_any_part_and_their_damage_is_found() {
    let arrays = numpy_gguf("compressed.npz");
    assert_eq!(differences(&*arrays, &*numpy_gguf("arrays.pt")), [""; 0]);
    assert_converts(&*arrays);
    // A part in the middle, after the end was read, and in the order of Fortran.
    let (mut whole, mut part) = (vec![0; 240], vec![0; 2 * 8]);
    arrays
        .read_box("fortran", &TensorBox::whole(&[2, 3, 5]), &mut whole)
        .unwrap();
    arrays
        .read_box(
            "fortran",
            &TensorBox::new(vec![1, 1, 2], vec![1, 1, 2]),
            &mut part,
        )
        .unwrap();
    let at = (15 + 5 + 2) * 8;
    assert_eq!(part, whole[at..at + 16]);
    // With hashes too.
    let parent = tempfile::tempdir().unwrap();
    let path = parent.path().join("a.npz");
    std::fs::copy(fixture("numpy_gguf/compressed.npz"), &path).unwrap();
    add_integrity(&path, None).unwrap();
    let sealed = opened(&path);
    let report = verify(&*sealed, Level::Deep, VerifyOptions::default()).unwrap();
    assert!(
        report.is_ok() && report.digests == 8,
        "{:?}",
        report.problems
    );
    std::fs::remove_file(path.with_extension("npz.integrity")).unwrap();
    // A changed bit of the stored bytes is found without them too: the archive has checksums of
    // what they become.
    let bytes = std::fs::read(fixture("numpy_gguf/compressed.npz")).unwrap();
    let at = bytes
        .windows(16)
        .position(|part| part == b"model.weight.npy")
        .unwrap()
        + 120;
    for bit in 0..64 {
        let mut changed = bytes.clone();
        changed[at + bit / 8] ^= 1 << (bit % 8);
        std::fs::write(&path, changed).unwrap();
        let is_sound = open(&path, OpenOptions::default()).is_ok_and(|opened| {
            verify(&*opened, Level::Hashes, VerifyOptions::default())
                .is_ok_and(|report| report.is_ok())
        });
        assert!(!is_sound, "bit {bit}");
    }
}

#[test]
fn big_endian_arrays_are_read_as_the_numbers_that_they_are() {
    let big_endian = open(fixture("numpy_gguf/big_endian.npy"), OpenOptions::default()).unwrap();
    let expected = numpy_gguf("arrays.pt");
    let as_float = Cast {
        dtype: DType::F32,
        with_optimizer: false,
    };
    let expected = View::new(
        &*expected,
        |key| match key {
            "half" => Rename::To("big_endian".to_owned()),
            _ => Rename::Drop,
        },
        Some(as_float),
    );
    assert_eq!(differences(&*big_endian, &expected.unwrap()), [""; 0]);
    // A part of it too.
    let mut whole = [0; 24];
    let all = TensorBox::whole(&[6]);
    big_endian.read_box("big_endian", &all, &mut whole).unwrap();
    let mut part = [0; 8];
    let middle = TensorBox::new(vec![2], vec![2]);
    big_endian
        .read_box("big_endian", &middle, &mut part)
        .unwrap();
    assert_eq!(part, whole[8..16]);
    let report = verify(&*big_endian, Level::Deep, VerifyOptions::default()).unwrap();
    assert!(report.is_ok(), "{:?}", report.problems);
}

#[test]
fn what_numpy_only_pickles_is_refused_by_name() {
    for (name, what) in [("objects.npy", "|O"), ("bzip2.npz", "compressed")] {
        match refused(&fixture("numpy_gguf").join(name)) {
            FileError::File { source, .. } => {
                assert!(source.to_string().contains(what), "{source}")
            }
            other => panic!("{other}"),
        }
    }
}

/// Returns the bytes of an archive in which some bytes of its directory have changed. They begin
/// `before` bytes before the name of a record there.
fn with_directory(name: &[u8], before: usize, new: &[u8]) -> Vec<u8> {
    let mut bytes = std::fs::read(fixture("numpy_gguf/arrays.npz")).unwrap();
    let mut windows = bytes.windows(name.len());
    // The directory comes last.
    let start = windows.rposition(|part| part == name).unwrap() - before;
    bytes[start..start + new.len()].copy_from_slice(new);
    bytes
}

#[test]
fn an_error_in_the_directory_of_an_archive_of_numpy_is_not_about_torch() {
    let parent = tempfile::tempdir().unwrap();
    let path = parent.path().join("arrays.npz");
    for (bytes, kind, words) in [
        (
            with_directory(b"mask.npy", 0, b"half.npy"),
            ErrorKind::Corrupt,
            "a record stands twice in the directory",
        ),
        (
            with_directory(b"mask.npy", 0, b"../m.npy"),
            ErrorKind::Corrupt,
            "a record's name is not a plain relative path",
        ),
        // The method of compression is 36 bytes before the name.
        (
            with_directory(b"mask.npy", 36, &[12]),
            ErrorKind::UnsupportedVersion,
            "the record `mask.npy`, which is compressed with bzip2, is not supported",
        ),
        (
            with_directory(b"mask.npy", 36, &[14]),
            ErrorKind::UnsupportedVersion,
            "the record `mask.npy`, which is compressed with LZMA, is not supported",
        ),
        (
            with_directory(b"mask.npy", 36, &[99]),
            ErrorKind::Corrupt,
            "the record is compressed in an unknown way",
        ),
    ] {
        std::fs::write(&path, bytes).unwrap();
        let error = refused(&path);
        let text = with_causes(&error);
        assert_eq!(error.kind(), kind, "{text}");
        assert!(text.contains(words) && !text.contains("torch"), "{text}");
    }
}

#[test]
fn arrays_that_hold_no_numbers_are_opaque_beside_those_that_do() {
    for name in ["mixed.npz", "mixed_compressed.npz"] {
        let arrays = open(fixture("numpy_gguf").join(name), OpenOptions::default()).unwrap();
        for (key, what) in [
            ("texts", "NumPy's type `<U5`"),
            ("times", "NumPy's type `<M8[D]`"),
            ("objects", "NumPy's type `|O`"),
            ("structures", "an array of structures"),
        ] {
            let kind = arrays.opaque_type(key).unwrap().unwrap();
            assert!(kind.contains(what), "{kind}");
        }
        let numbers = View::new(
            &*arrays,
            |key| match key {
                "weight" => Rename::Keep,
                _ => Rename::Drop,
            },
            None,
        )
        .unwrap();
        let mut weight = [0; 16];
        let whole = TensorBox::whole(&[2, 1]);
        numbers.read_box("weight", &whole, &mut weight).unwrap();
        let elements = [1.5f64, -2.0].map(f64::to_le_bytes);
        assert_eq!(weight.as_chunks().0, elements);
        assert_converts(&numbers);
        let report = verify(&*arrays, Level::Deep, VerifyOptions::default()).unwrap();
        assert!(report.is_ok(), "{:?}", report.problems);
    }
}

#[test]
fn tensors_of_gguf_are_read_and_blocks_become_numbers() {
    let model = numpy_gguf("model.gguf");
    assert_eq!(model.format(), Format::Gguf);
    let tensors = View::new(
        &*model,
        |key| {
            if key.ends_with("weight") {
                Rename::Keep
            } else {
                Rename::Drop
            }
        },
        None,
    );
    let without_k = View::new(
        tensors.as_ref().unwrap(),
        |key| {
            if key.contains("ffn_gate") {
                Rename::Drop
            } else {
                Rename::Keep
            }
        },
        None,
    );
    assert_eq!(
        differences(&without_k.unwrap(), &*numpy_gguf("gguf.pt")),
        [""; 0]
    );
    assert_eq!(
        model.read_value("general.name").unwrap(),
        PlainValue::Str("a model".to_owned())
    );
    let tokens = ["<s>", "a", "b"].map(PlainValue::from).to_vec();
    assert_eq!(
        model.read_value("tokenizer.ggml.tokens").unwrap(),
        PlainValue::List(tokens)
    );
    // Kinds of blocks that are not read are named.
    let of = model.opaque_type("blk.0.ffn_gate.weight").unwrap().unwrap();
    assert!(of.contains("Q4_K") && of.contains("[2, 256]"), "{of}");
    assert!(matches!(
        model.read_value("blk.0.ffn_gate.weight"),
        Err(FileError::Item {
            source: FormatError::NotRead { .. },
            ..
        })
    ));
    let known = View::new(
        &*model,
        |key| {
            if key.contains("ffn_gate") {
                Rename::Drop
            } else {
                Rename::Keep
            }
        },
        None,
    );
    assert_converts(&known.unwrap());
}

#[test]
fn a_file_of_a_split_model_is_not_taken_for_the_model() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model-00001-of-00003.gguf");
    let file = |count: u16| {
        let key = b"split.count".as_slice();
        let counts = [
            &3u32.to_le_bytes()[..],
            &0u64.to_le_bytes(),
            &1u64.to_le_bytes(),
        ]
        .concat();
        let value = [
            &(key.len() as u64).to_le_bytes()[..],
            key,
            &2u32.to_le_bytes(),
            &count.to_le_bytes(),
        ]
        .concat();
        [b"GGUF".as_slice(), &counts, &value].concat()
    };
    std::fs::write(&path, file(3)).unwrap();
    let error = with_causes(&refused(&path));
    assert!(
        error.contains("one of the 3 files") && error.contains("--merge"),
        "{error}"
    );
    std::fs::write(&path, file(1)).unwrap();
    assert_eq!(
        opened(&path).read_value("split.count").unwrap(),
        PlainValue::Int(1)
    );
}

#[test]
fn blocks_of_gguf_that_are_not_read_are_compared_and_must_be_there() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.gguf");
    let bytes = std::fs::read(fixture("numpy_gguf/model.gguf")).unwrap();
    // The last tensor of the file is one of 2 blocks of Q4_K.
    let mut changed = bytes.clone();
    changed[bytes.len() - 1] ^= 1;
    std::fs::write(&path, &changed).unwrap();
    let (first, second) = (numpy_gguf("model.gguf"), opened(&path));
    let mut found = Vec::new();
    diff(&*first, &*second, DiffOptions::default(), &mut |fqn, _| {
        found.push(fqn.to_owned())
    })
    .unwrap();
    assert_eq!(found, ["blk.0.ffn_gate.weight"]);
    assert_ne!(
        digest(&*first, 1).unwrap().root(),
        digest(&*second, 1).unwrap().root()
    );
    for kept in [bytes.len() - 1, bytes.len() - 288] {
        std::fs::write(&path, &bytes[..kept]).unwrap();
        let error = refused(&path).to_string();
        assert!(error.contains("model.gguf"), "{error}");
    }
}

/// Makes a GGUF file with so many bytes of data, and tensors of 32-bit floats. Of each it takes the
/// name, the number of elements, and where it begins in the data.
fn gguf_of(alignment: u32, tensors: &[(&str, u64, u64)], data_bytes: usize) -> Vec<u8> {
    let text = |text: &str| [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat();
    let mut file = b"GGUF\x03\0\0\0".to_vec();
    file.extend((tensors.len() as u64).to_le_bytes());
    file.extend(1u64.to_le_bytes());
    file.extend(text("general.alignment"));
    file.extend([4u32.to_le_bytes(), alignment.to_le_bytes()].concat());
    for (name, elements, offset) in tensors {
        file.extend(text(name));
        file.extend(1u32.to_le_bytes());
        file.extend(elements.to_le_bytes());
        file.extend(0u32.to_le_bytes());
        file.extend(offset.to_le_bytes());
    }
    file.resize(file.len().next_multiple_of(alignment as usize), 0);
    let data_offset = file.len();
    file.resize(data_offset + data_bytes, 1);
    file
}

/// The arguments of [`gguf_of`].
type Data<'a> = (u32, &'a [(&'a str, u64, u64)], usize);

#[test]
fn tensors_of_gguf_lie_one_after_the_other() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.gguf");
    let sound: [Data<'_>; 7] = [
        (32, &[("a", 16, 0), ("b", 8, 64)], 96),
        (32, &[("a", 9, 0), ("b", 8, 64)], 96),
        // The padding of the last one may be there.
        (32, &[("a", 9, 0)], 36),
        (32, &[("a", 9, 0)], 64),
        (32, &[("a", 0, 0), ("b", 8, 0)], 32),
        (8, &[("a", 1, 0), ("b", 1, 8)], 12),
        (1, &[("a", 1, 0), ("b", 1, 4)], 8),
    ];
    for (alignment, tensors, data_bytes) in sound {
        std::fs::write(&path, gguf_of(alignment, tensors, data_bytes)).unwrap();
        let model = opened(&path);
        let report = verify(&*model, Level::Deep, VerifyOptions::default()).unwrap();
        assert!(report.is_ok(), "{tensors:?}: {:?}", report.problems);
        assert_eq!(report.tensors, tensors.len(), "{tensors:?}");
    }
    let damaged: [(Data<'_>, &str); 9] = [
        ((32, &[("a", 4, 7)], 64), "`a` begins at byte 7"),
        (
            (32, &[("a", 16, 0), ("b", 8, 68)], 100),
            "`b` begins at byte 68 of the data, which is no multiple of 32",
        ),
        (
            (32, &[("a", 16, 0), ("b", 16, 0)], 64),
            "`b` begins at byte 0",
        ),
        (
            (32, &[("a", 16, 0), ("b", 8, 32)], 64),
            "`b` begins at byte 32 of the data, in the tensor before it, which ends at 64",
        ),
        ((32, &[("a", 8, 32)], 64), "`a` begins at byte 32"),
        (
            (32, &[("a", 8, 0), ("b", 8, 64)], 96),
            "`b` begins at byte 64 of the data, too far from the end of what is before it at 32",
        ),
        (
            (8, &[("a", 1, 0), ("b", 1, 16)], 20),
            "`b` begins at byte 16",
        ),
        // Two tensors that have changed places.
        (
            (32, &[("a", 8, 32), ("b", 8, 0)], 64),
            "`a` begins at byte 32",
        ),
        (
            (32, &[("a", 8, 0), ("b", 16, 32)], 64),
            "`b` reaches beyond the end of the file",
        ),
    ];
    for ((alignment, tensors, data_bytes), words) in damaged {
        std::fs::write(&path, gguf_of(alignment, tensors, data_bytes)).unwrap();
        let error = refused(&path);
        let text = with_causes(&error);
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{tensors:?}: {text}");
        assert!(text.contains(words), "{tensors:?}: {text}");
    }
}

#[test]
fn any_part_of_a_quantized_tensor_is_read() {
    let model = numpy_gguf("model.gguf");
    for (name, shape) in [
        ("blk.0.attn_q.weight", [32, 64]),
        ("blk.0.ffn_up.weight", [4, 96]),
    ] {
        assert_eq!(
            model.metadata().tensor(name).unwrap().properties.dtype,
            DType::F32
        );
        let mut whole = vec![0; shape[0] * shape[1] * 4];
        model
            .read_box(name, &TensorBox::whole(&shape), &mut whole)
            .unwrap();
        for (offsets, sizes) in [
            ([1, 0], [2, shape[1]]),
            ([0, 5], [4, 40]),
            ([3, 31], [1, 2]),
            ([2, 63], [1, 1]),
        ] {
            let mut part = vec![0; sizes[0] * sizes[1] * 4];
            model
                .read_box(
                    name,
                    &TensorBox::new(offsets.to_vec(), sizes.to_vec()),
                    &mut part,
                )
                .unwrap();
            let rows = (0..sizes[0]).flat_map(|row| {
                let start = ((offsets[0] + row) * shape[1] + offsets[1]) * 4;
                whole[start..start + sizes[1] * 4].to_vec()
            });
            assert_eq!(part, rows.collect::<Vec<u8>>(), "{name} {offsets:?}");
        }
    }
}
