//! Writes torch's `Metadata` pickle: protocol 4, nothing random, so the same metadata gives the
//! same bytes.

use std::collections::HashMap;

use fsdp_layout::PathPart;

use super::{
    Entry, MemoryFormat, Metadata, StorageInfo, StorageMeta, TensorEntry, TensorProperties,
};
use crate::pickle::write;

const METADATA_MODULE: &str = "torch.distributed.checkpoint.metadata";

/// Encodes metadata as torch's `FileSystemReader` reads it.
///
/// ```
/// use fsdp_formats::metadata::{decode, encode, Metadata};
/// let metadata = Metadata { version: Some("1.0.0".into()), ..Metadata::default() };
/// assert_eq!(decode(&encode(&metadata))?, metadata);
/// # Ok::<(), fsdp_formats::PickleError>(())
/// ```
#[must_use]
pub fn encode(metadata: &Metadata) -> Vec<u8> {
    let mut bytes = Vec::new();
    encode_in_pieces(metadata, &mut |piece| bytes.extend_from_slice(piece));
    bytes
}

/// Encodes metadata as [`encode`] does, and hands over the bytes in order in pieces of about a
/// mebibyte. So the whole, which is gigabytes for many thousand ranks, need never be in memory.
pub fn encode_in_pieces(metadata: &Metadata, sink: &mut dyn FnMut(&[u8])) {
    let mut encoder = Encoder {
        out: Vec::new(),
        sink,
        memo: HashMap::new(),
        memo_count: 0,
    };
    write::proto(&mut encoder.out, 4);
    encoder.object(METADATA_MODULE, "Metadata", |encoder| {
        encoder.field("state_dict_metadata", |encoder| {
            encoder.dict(metadata.entries.iter(), |encoder, (fqn, entry)| {
                encoder.text(fqn);
                match entry {
                    Entry::Tensor(tensor) => encoder.tensor(tensor),
                    Entry::Bytes(_) => encoder.new_object(METADATA_MODULE, "BytesStorageMetadata"),
                }
            });
        });
        encoder.field("planner_data", |encoder| match &metadata.planner_data {
            None => encoder.out.push(write::NONE),
            Some(paths) => encoder.dict(paths.iter(), |encoder, (fqn, path)| {
                encoder.text(fqn);
                write::open_tuple(&mut encoder.out, path.0.len());
                for part in &path.0 {
                    match part {
                        PathPart::Key(key) => encoder.text(key),
                        PathPart::Index(index) => write::unsigned(&mut encoder.out, *index as u64),
                    }
                }
                write::close_tuple(&mut encoder.out, path.0.len());
            }),
        });
        encoder.field("storage_data", |encoder| encoder.storage_data(metadata));
        encoder.field("storage_meta", |encoder| match &metadata.storage_meta {
            None => encoder.out.push(write::NONE),
            Some(meta) => encoder.storage_meta(meta),
        });
        encoder.field("version", |encoder| {
            encoder.optional_text(metadata.version.as_deref())
        });
    });
    encoder.op(write::STOP);
    (encoder.sink)(&encoder.out);
}

/// The length from which what is encoded is handed over.
const PIECE_BYTES: usize = 1 << 20;

/// An encoder of metadata as a pickle.
struct Encoder<'m, 's> {
    /// The bytes that are not handed over yet.
    out: Vec<u8>,
    sink: &'s mut dyn FnMut(&[u8]),
    /// Memo index of what was written before: texts, globals and a few objects, by a key of its
    /// own.
    memo: HashMap<(&'static str, &'m str), u32>,
    /// The number of values in the memo of the pickle.
    memo_count: u32,
}

impl<'m> Encoder<'m, '_> {
    /// Hands over what is encoded so far, if it is long enough.
    fn spill(&mut self) {
        if self.out.len() >= PIECE_BYTES {
            (self.sink)(&self.out);
            self.out.clear();
        }
    }

    /// Writes an opcode without an argument.
    fn op(&mut self, opcode: u8) {
        self.out.push(opcode);
    }

    /// Writes a value once with `write_value`, and afterwards only refers to it by its place in the
    /// memo. `kind` and `key` identify the value.
    fn shared(&mut self, kind: &'static str, key: &'m str, write_value: impl FnOnce(&mut Self)) {
        match self.memo.get(&(kind, key)) {
            // Indices of one byte and of four have codes of their own.
            Some(&index) => match u8::try_from(index) {
                Ok(index) => self.out.extend_from_slice(&[b'h', index]),
                Err(_) => {
                    self.out.extend_from_slice(b"j");
                    self.out.extend_from_slice(&index.to_le_bytes());
                }
            },
            None => {
                write_value(self);
                // `MEMOIZE` numbers values by itself, in the order in which they are written.
                self.op(0x94);
                self.memo.insert((kind, key), self.memo_count);
                self.memo_count += 1;
            }
        }
    }

    /// Writes a text, once.
    fn text(&mut self, text: &'m str) {
        self.shared("", text, |encoder| write::text4(&mut encoder.out, text));
    }

    /// Writes a text, or `None`.
    fn optional_text(&mut self, text: Option<&'m str>) {
        match text {
            Some(text) => self.text(text),
            None => self.out.push(write::NONE),
        }
    }

    /// Writes a reference to a Python class or function.
    fn global(&mut self, module: &'static str, name: &'static str) {
        self.shared(module, name, |encoder| {
            encoder.text(module);
            encoder.text(name);
            encoder.op(0x93);
        });
    }

    /// Writes an object of a class, without attributes.
    fn new_object(&mut self, module: &'static str, class: &'static str) {
        self.global(module, class);
        self.op(write::EMPTY_TUPLE);
        self.op(write::NEWOBJ);
    }

    /// Writes an object whose state is a dict of fields.
    fn object(
        &mut self,
        module: &'static str,
        class: &'static str,
        write_fields: impl FnOnce(&mut Self),
    ) {
        self.new_object(module, class);
        self.op(write::EMPTY_DICT);
        self.op(write::MARK);
        write_fields(self);
        self.op(write::SETITEMS);
        self.op(write::BUILD);
    }

    /// Writes an attribute of an object: its name, then its value.
    fn field(&mut self, name: &'static str, write_value: impl FnOnce(&mut Self)) {
        self.text(name);
        write_value(self);
    }

    /// Writes a dict, of which `write_item` writes each key and value.
    fn dict<T>(
        &mut self,
        items: impl Iterator<Item = T>,
        mut write_item: impl FnMut(&mut Self, T),
    ) {
        self.op(write::EMPTY_DICT);
        self.op(write::MARK);
        for item in items {
            write_item(self, item);
            self.spill();
        }
        self.op(write::SETITEMS);
    }

    /// Writes a list, of which `write_item` writes each item.
    fn list<T>(&mut self, items: &'m [T], mut write_item: impl FnMut(&mut Self, &'m T)) {
        self.op(write::EMPTY_LIST);
        self.op(write::MARK);
        for item in items {
            write_item(self, item);
            self.spill();
        }
        self.op(write::APPENDS);
    }

    /// Writes a `torch.Size`.
    fn size(&mut self, sizes: &[usize]) {
        self.global("torch", "Size");
        write::sizes(&mut self.out, sizes);
        write::close_tuple(&mut self.out, 1);
        self.op(write::REDUCE);
    }

    /// Writes the entry of a tensor: its properties, its shape, and its boxes.
    fn tensor(&mut self, tensor: &'m TensorEntry) {
        self.object(METADATA_MODULE, "TensorStorageMetadata", |encoder| {
            encoder.field("properties", |encoder| {
                encoder.properties(&tensor.properties)
            });
            encoder.field("size", |encoder| encoder.size(&tensor.shape));
            encoder.field("chunks", |encoder| {
                encoder.list(&tensor.chunks, |encoder, chunk| {
                    encoder.object(METADATA_MODULE, "ChunkStorageMetadata", |encoder| {
                        encoder.field("offsets", |encoder| encoder.size(&chunk.bounds.offsets));
                        encoder.field("sizes", |encoder| encoder.size(&chunk.bounds.sizes));
                    });
                });
            });
        });
    }

    /// Writes the properties of a tensor: torch builds them from a tuple.
    fn properties(&mut self, properties: &TensorProperties) {
        self.new_object(METADATA_MODULE, "TensorProperties");
        self.op(write::MARK);
        self.global("torch", properties.dtype.torch_name());
        // The layout and the memory format are the same objects in all tensors.
        self.shared("a layout", "torch.strided", |encoder| {
            encoder.global("torch.serialization", "_get_layout");
            encoder.text("torch.strided");
            write::close_tuple(&mut encoder.out, 1);
            encoder.op(write::REDUCE);
        });
        write::bool(&mut self.out, properties.requires_grad);
        let (format, name) = match properties.memory_format {
            MemoryFormat::Contiguous => (0, "contiguous"),
            MemoryFormat::ChannelsLast => (1, "channels_last"),
            MemoryFormat::Preserve => (2, "preserve"),
        };
        self.shared("a memory format", name, |encoder| {
            encoder.global(METADATA_MODULE, "_MEM_FORMAT_ENCODING");
            write::int(&mut encoder.out, format);
            write::close_tuple(&mut encoder.out, 1);
            encoder.op(write::REDUCE);
        });
        write::bool(&mut self.out, properties.pin_memory);
        // Newer versions of torch add the strides, which no loader uses, and older ones refuse a
        // tuple of six.
        self.op(write::TUPLE);
        self.op(write::BUILD);
    }

    /// Writes the dict that leads from each value and box to the place of its bytes.
    fn storage_data(&mut self, metadata: &'m Metadata) {
        let items = metadata.entries.iter().flat_map(|(fqn, entry)| {
            let items = entry.items().enumerate();
            items.filter_map(move |(index, (bounds, stored))| Some((fqn, index, bounds, stored?)))
        });
        self.dict(items, |encoder, (fqn, index, bounds, stored)| {
            encoder.index(fqn, bounds.map(|bounds| (index, &bounds.offsets[..])));
            encoder.storage_info(stored);
        });
    }

    /// Writes the key of a value, or of a box of a tensor, in the dict of places.
    fn index(&mut self, fqn: &'m str, chunk: Option<(usize, &[usize])>) {
        self.object(METADATA_MODULE, "MetadataIndex", |encoder| {
            encoder.field("fqn", |encoder| encoder.text(fqn));
            encoder.field("index", |encoder| match chunk {
                Some((index, _)) => write::unsigned(&mut encoder.out, index as u64),
                None => encoder.out.push(write::NONE),
            });
            if let Some((_, offsets)) = chunk {
                encoder.field("offset", |encoder| encoder.size(offsets));
            }
        });
    }

    /// Writes the place of the bytes of one value or box.
    fn storage_info(&mut self, stored: &'m StorageInfo) {
        self.object(
            "torch.distributed.checkpoint.filesystem",
            "_StorageInfo",
            |encoder| {
                encoder.field("relative_path", |encoder| {
                    encoder.text(&stored.relative_path)
                });
                encoder.field("offset", |encoder| {
                    write::unsigned(&mut encoder.out, stored.offset)
                });
                encoder.field("length", |encoder| {
                    write::unsigned(&mut encoder.out, stored.length)
                });
                if !stored.transforms.is_empty() {
                    encoder.field("transform_descriptors", |encoder| {
                        encoder.list(&stored.transforms, |encoder, transform| {
                            encoder.text(transform)
                        });
                    });
                }
            },
        );
    }

    /// Writes torch's `StorageMeta`.
    fn storage_meta(&mut self, meta: &'m StorageMeta) {
        self.object(METADATA_MODULE, "StorageMeta", |encoder| {
            encoder.field("checkpoint_id", |encoder| {
                encoder.optional_text(meta.checkpoint_id.as_deref())
            });
            encoder.field("save_id", |encoder| {
                encoder.optional_text(meta.save_id.as_deref())
            });
            encoder.field("load_id", |encoder| {
                encoder.optional_text(meta.load_id.as_deref())
            });
            encoder.field("modules", |encoder| encoder.op(write::EMPTY_LIST));
        });
    }
}
