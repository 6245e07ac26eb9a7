//! The items that one rank could write, and the part of them that most ranks have in common.

use std::hash::{Hash, Hasher};

use fsdp_layout::{DType, KeyPath, TensorBox};
use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_128;

use crate::metadata::TensorProperties;

/// The items that one rank could write, in the order of its state dict.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct LocalPlan {
    /// The items. No flat key occurs twice.
    pub items: Vec<WriteItem>,
}

/// One flat key of a rank's state dict.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WriteItem {
    /// The flat key.
    pub fqn: String,
    /// The place in the nested state dict, if that was flattened.
    pub path: Option<KeyPath>,
    /// The tensor or the value.
    pub content: WriteContent,
}

/// The content of a [`WriteItem`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum WriteContent {
    /// The boxes of a tensor that this rank holds.
    Tensor {
        /// The dtype and other properties that torch records.
        properties: TensorProperties,
        /// Global shape.
        shape: Vec<usize>,
        /// The boxes; empty ones are dropped. A [`schema`](LocalPlan::schema) has none.
        boxes: Vec<TensorBox>,
        /// `true` if every rank that has the tensor holds the whole of it, as its only box. It is
        /// then sent to the planner once for all ranks.
        is_whole: bool,
    },
    /// A non-tensor value, which every rank that has it lists.
    Value {
        /// The bytes of its item, for balancing
        /// ([`value_item_length`](crate::writer::value_item_length)).
        length: u64,
    },
}

/// A box that one rank holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldBox {
    /// Position of its item in the rank's plan.
    pub item: u32,
    /// Position of the box in the item.
    pub index: u32,
    /// The box.
    pub bounds: TensorBox,
}

impl LocalPlan {
    /// Adds a tensor of which this rank holds these boxes.
    pub fn add_tensor(
        &mut self,
        fqn: impl Into<String>,
        path: Option<KeyPath>,
        dtype: DType,
        shape: Vec<usize>,
        boxes: Vec<TensorBox>,
    ) {
        let content = WriteContent::Tensor {
            properties: TensorProperties::new(dtype),
            shape,
            boxes,
            is_whole: false,
        };
        self.add(fqn.into(), path, content);
    }

    /// Adds a tensor that is whole on this rank, and on every other rank that adds it with this
    /// method.
    pub fn add_whole_tensor(
        &mut self,
        fqn: impl Into<String>,
        path: Option<KeyPath>,
        dtype: DType,
        shape: Vec<usize>,
    ) {
        let content = WriteContent::Tensor {
            properties: TensorProperties::new(dtype),
            boxes: vec![TensorBox::whole(&shape)],
            shape,
            is_whole: true,
        };
        self.add(fqn.into(), path, content);
    }

    /// Adds a non-tensor value.
    pub fn add_value(&mut self, fqn: impl Into<String>, path: Option<KeyPath>, length: u64) {
        self.add(fqn.into(), path, WriteContent::Value { length });
    }

    fn add(&mut self, fqn: String, path: Option<KeyPath>, content: WriteContent) {
        self.items.push(WriteItem { fqn, path, content });
    }

    /// Returns a hash of everything except the lengths of values. While no rank's hash changes, the
    /// global plan does not change either (except for its balance), and need not be made again.
    #[must_use]
    pub fn layout_hash(&self) -> u128 {
        self.hash_items(true)
    }

    /// Returns a hash of the [`schema`](LocalPlan::schema), without the lengths of values. Of ranks
    /// with the same hash only one has to send its schema.
    #[must_use]
    pub fn schema_hash(&self) -> u128 {
        self.hash_items(false)
    }

    /// Returns a hash of all that ranks must agree on about the items, and of their boxes if
    /// `with_boxes`. The lengths of values are left out.
    fn hash_items(&self, with_boxes: bool) -> u128 {
        let mut hasher = WideHasher::default();
        for WriteItem { fqn, path, content } in &self.items {
            // The first thing after the path tells values and tensors apart.
            match content {
                WriteContent::Value { .. } => (fqn, path, false).hash(&mut hasher),
                WriteContent::Tensor {
                    properties,
                    shape,
                    boxes,
                    is_whole,
                } => {
                    (fqn, path, true, properties, shape, is_whole).hash(&mut hasher);
                    with_boxes.then_some(boxes).hash(&mut hasher);
                }
            }
        }
        hasher.0.finish_128()
    }

    /// Returns the plan without its boxes: the schema, which is the same on most ranks of a job.
    /// The boxes of whole tensors follow from it; the others are [`held_boxes`](Self::held_boxes).
    ///
    /// A global plan is made from the distinct schemas of all ranks, each sent once, and from each
    /// rank's [`HeldBox`]es. So a rank sends little more than its boxes, and all keys, paths,
    /// dtypes and shapes are still compared.
    #[must_use]
    pub fn schema(&self) -> LocalPlan {
        let mut schema = self.clone();
        for item in &mut schema.items {
            if let WriteContent::Tensor { boxes, .. } = &mut item.content {
                *boxes = Vec::new();
            }
        }
        schema
    }

    /// Returns the boxes that are not in the [`schema`](LocalPlan::schema). Empty boxes are left
    /// out.
    #[must_use]
    pub fn held_boxes(&self) -> Vec<HeldBox> {
        let mut held = Vec::new();
        for (position, item) in self.items.iter().enumerate() {
            let WriteContent::Tensor {
                boxes,
                is_whole: false,
                ..
            } = &item.content
            else {
                continue;
            };
            for (index, bounds) in boxes.iter().enumerate() {
                if !bounds.is_empty() {
                    held.push(HeldBox {
                        item: position as u32,
                        index: index as u32,
                        bounds: bounds.clone(),
                    });
                }
            }
        }
        held
    }
}

impl HeldBox {
    /// Returns about how many bytes it takes to send this. A number takes eight bytes at most.
    #[must_use]
    pub fn wire_bytes(&self) -> u64 {
        (28 + 16 * self.bounds.rank()) as u64
    }
}

impl WriteItem {
    /// Returns about how many bytes it takes to send this, without its boxes. A number or a length
    /// takes eight bytes at most.
    #[must_use]
    pub fn wire_bytes(&self) -> u64 {
        let path = self
            .path
            .as_ref()
            .map_or(0, |path| path.flat_key().len() + 12 * path.0.len());
        let shape = match &self.content {
            WriteContent::Tensor { shape, .. } => 8 * shape.len(),
            WriteContent::Value { .. } => 0,
        };
        (64 + self.fqn.len() + path + shape) as u64
    }
}

/// A hasher whose result has 128 bits, so that equal hashes mean equal plans.
#[derive(Default)]
struct WideHasher(XxHash3_128);

impl Hasher for WideHasher {
    fn write(&mut self, bytes: &[u8]) {
        self.0.write(bytes);
    }

    fn finish(&self) -> u64 {
        self.0.finish_128() as u64
    }
}
