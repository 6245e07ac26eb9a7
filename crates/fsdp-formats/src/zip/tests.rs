//! Archives: ours are read by an independent zip reader, and hostile ones are refused.

use super::*;
use crate::error::FormatError;
use crate::storage::read_at::ReadAt;
use std::io::Read as _;

/// Returns an archive with these storages.
fn archive(storages: &[&[u8]]) -> Vec<u8> {
    let lengths: Vec<u64> = storages.iter().map(|storage| storage.len()).collect();
    let crcs: Vec<u32> = storages
        .iter()
        .map(|storage| crc32fast::hash(storage))
        .collect();
    let layout = ArchiveLayout::new("archive", b"\x80\x02N.".to_vec(), &lengths);
    let mut bytes = layout.head(crcs.first().copied().unwrap_or(0));
    for (index, storage) in storages.iter().enumerate() {
        if index > 0 {
            bytes.extend(layout.storage_header(index, crcs[index]));
        }
        assert_eq!(bytes.len() as u64, layout.storage_offset(index));
        assert_eq!(bytes.len() % STORAGE_ALIGNMENT as usize, 0);
        bytes.extend_from_slice(storage);
    }
    assert_eq!(bytes.len() as u64, layout.tail_offset());
    bytes.extend(layout.tail(&crcs));
    assert_eq!(bytes.len() as u64, layout.length());
    bytes
}

#[test]
fn torch_is_not_told_that_it_can_compute_where_storages_are() {
    let bytes = archive(&[b"a", b"bc"]);
    let mut zip = zip::ZipArchive::new(std::io::Cursor::new(&bytes)).unwrap();
    let mut version = String::new();
    zip.by_name("archive/.format_version")
        .unwrap()
        .read_to_string(&mut version)
        .unwrap();
    assert!(version.as_str() < "1", "{version}");
}

#[test]
fn an_independent_zip_reader_reads_ours_and_checks_its_crcs() {
    for storages in [
        &[][..],
        &[b"".as_slice()],
        &[b"hello"],
        &[b"a", b"", &[7; 1000]],
    ] {
        let bytes = archive(storages);
        let mut zip = zip::ZipArchive::new(std::io::Cursor::new(&bytes)).unwrap();
        let mut content = Vec::new();
        zip.by_name("archive/version")
            .unwrap()
            .read_to_end(&mut content)
            .unwrap();
        assert_eq!(content, b"3\n");
        for (index, storage) in storages.iter().enumerate() {
            content.clear();
            zip.by_name(&format!("archive/data/{index}"))
                .unwrap()
                .read_to_end(&mut content)
                .unwrap();
            assert_eq!(&content, storage);
        }
        let directory = Directory::read(&bytes).unwrap();
        assert_eq!(directory.root, "archive");
        // Besides the storages: the pickle, the version, the byte order, the format version and the
        // alignment.
        assert_eq!(directory.records.len(), 5 + storages.len());
        for (index, storage) in storages.iter().enumerate() {
            assert_eq!(
                directory
                    .read_record(&bytes, &format!("data/{index}"), 1 << 20)
                    .unwrap(),
                *storage
            );
        }
    }
}

/// A source of many zeros with a few known ranges, so that archives beyond 4 GiB cost nothing.
struct Sparse {
    parts: Vec<(u64, Vec<u8>)>,
    len: u64,
}

impl ReadAt for Sparse {
    fn len(&self) -> u64 {
        self.len
    }

    fn read_exact_at(&self, offset: u64, dst: &mut [u8]) -> Result<(), FormatError> {
        dst.fill(0);
        for (start, bytes) in &self.parts {
            for (index, byte) in bytes.iter().enumerate() {
                let position = start + index as u64;
                if position >= offset && position < offset + dst.len() as u64 {
                    dst[(position - offset) as usize] = *byte;
                }
            }
        }
        Ok(())
    }
}

#[test]
fn storages_beyond_4_gib_take_zip64() {
    for lengths in [
        &[u64::from(u32::MAX) - 1][..],
        &[u64::from(u32::MAX)],
        &[5 << 30],
        &[5 << 30, 7, 6 << 30],
    ] {
        let layout = ArchiveLayout::new("archive", b"\x80\x02N.".to_vec(), lengths);
        let mut parts = vec![(0, layout.head(1))];
        for index in 1..lengths.len() {
            let header = layout.storage_header(index, 1);
            parts.push((layout.storage_offset(index) - header.len() as u64, header));
        }
        parts.push((layout.tail_offset(), layout.tail(&vec![1; lengths.len()])));
        let source = Sparse {
            parts,
            len: layout.length(),
        };
        let directory = Directory::read(&source).unwrap();
        for (index, &length) in lengths.iter().enumerate() {
            let name = format!("data/{index}");
            let record = directory.get(&name).unwrap();
            assert_eq!(record.length, length);
            assert_eq!(
                directory.data_offset(&source, &name, record).unwrap(),
                layout.storage_offset(index)
            );
        }
    }
}

#[test]
fn every_prefix_and_every_flip_is_an_error_or_harmless() {
    let bytes = archive(&[b"hello"]);
    for end in 0..bytes.len() {
        assert!(
            Directory::read(&bytes[..end].to_vec()).is_err(),
            "prefix of {end} bytes"
        );
    }
    for bit in 0..bytes.len() * 8 {
        let mut flipped = bytes.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        // Reading must not panic. Not every flip has to be an error here: the integrity file
        // detects the others.
        if let Ok(directory) = Directory::read(&flipped) {
            for name in directory.records.keys() {
                let _ = directory.read_record(&flipped, name, 1 << 10);
            }
        }
    }
}

#[test]
fn names_that_lead_elsewhere_and_duplicates_are_refused() {
    let good = archive(&[b"hello"]);
    let patch = |good: &[u8], from: &[u8], to: &[u8]| {
        let mut bytes = good.to_vec();
        let mut position = 0;
        while let Some(found) = bytes[position..]
            .windows(from.len())
            .position(|window| window == from)
        {
            bytes[position + found..position + found + to.len()].copy_from_slice(to);
            position += found + from.len();
        }
        bytes
    };
    for (from, to) in [
        (&b"archive/version"[..], &b"archive/../etcp"[..]),
        (b"archive/version", b"/rchive/version"),
        (b"archive/version", b"archive\\version"),
        (b"archive/version", b"archive/versi\0n"),
        (b"archive/version", b"archivf/version"),
        (b"archive/version", b"archive/data.pk"),
    ] {
        let outcome = Directory::read(&patch(&good, from, to));
        // The last one only renames a record, to a name that nothing else has.
        assert_eq!(
            outcome.is_ok(),
            to == b"archive/data.pk",
            "{}",
            String::from_utf8_lossy(to)
        );
    }
    // Two records with one name.
    let two = archive(&[b"hello", b"world"]);
    assert!(Directory::read(&two).is_ok());
    let duplicate = patch(&two, b"archive/data/1", b"archive/data/0");
    assert!(
        Directory::read(&duplicate)
            .unwrap_err()
            .to_string()
            .contains("twice")
    );
    let directory = Directory::read(&good).unwrap();
    assert!(matches!(
        directory.get("nothing"),
        Err(FormatError::MissingRecord { .. })
    ));
}
