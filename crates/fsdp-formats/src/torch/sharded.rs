//! Parses a rank's part of a tensor in a pickle: a DTensor with its mesh and placements, or FSDP1's
//! ShardedTensor with its shards.
//!
//! Both are tensor subclasses: `_rebuild_from_type_v2(_rebuild_wrapper_subclass, class, arguments,
//! state)`, where the arguments are those of the whole tensor and the state holds the local parts.

use fsdp_layout::placement::boxes_of_placements;
use fsdp_layout::{DType, Placement, TensorBox};

use super::tensor_ref::{MAX_WRAPPERS, TensorRef};
use crate::error::FormatError;
use crate::limits::is_sane_shape;
use crate::pickle::{Global, Node, NodeId, Pickle, Walk};
use crate::strided::StridedLayout;

/// The part of a tensor that one rank has saved.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ShardedRef {
    /// Element type.
    pub(crate) dtype: DType,
    /// The shape of the whole tensor.
    pub(crate) shape: Vec<usize>,
    /// The local parts. The bounds of each part's layout are its box in the whole tensor.
    pub(crate) parts: Vec<TensorRef>,
    /// The number of ranks that have saved parts, or copies of parts.
    pub(crate) ranks: usize,
}

/// The attributes of an object, as `BUILD` would have set them.
type Attributes<'p> = &'p [(NodeId, NodeId)];

/// The largest number of parts of one tensor that a rank may have. A strided shard has a part for
/// each of its blocks.
const MAX_PARTS: usize = 1024;

/// Returns the class, the arguments and the state of a sharded tensor, if this node is one.
fn subclass<'p>(p: &'p Pickle<'_>, mut id: NodeId) -> Option<(&'p str, NodeId, NodeId)> {
    for _ in 0..MAX_WRAPPERS {
        let Node::Object(object) = p.node(id) else {
            return None;
        };
        match (object.global, p.args(object)) {
            // A parameter wraps its tensor.
            (Global::RebuildParameter, [inner, ..]) => id = *inner,
            (Global::RebuildFromTypeV2, [function, class, arguments, state]) => {
                return match (p.node(*function), p.node(*class)) {
                    (Node::Foreign(_, "_rebuild_wrapper_subclass"), Node::Foreign(_, class))
                        if ["DTensor", "ShardedTensor"].contains(class) =>
                    {
                        Some((class, *arguments, *state))
                    }
                    _ => None,
                };
            }
            _ => return None,
        }
    }
    None
}

/// Returns `true` if a node describes a rank's part of a tensor. Whether the description is
/// well-formed is not checked.
pub(crate) fn is_sharded(p: &Pickle<'_>, id: NodeId) -> bool {
    subclass(p, id).is_some()
}

impl ShardedRef {
    /// Returns the part of a tensor that this node describes; `None` if it describes something
    /// else. Many tensors may share lists and attributes, so each look through them is charged to
    /// the walk.
    pub(crate) fn of(
        p: &Pickle<'_>,
        id: NodeId,
        walk: &mut Walk,
    ) -> Result<Option<Self>, FormatError> {
        match subclass(p, id) {
            Some(("DTensor", arguments, state)) => dtensor(p, arguments, state, walk).map(Some),
            Some((_, arguments, state)) => sharded_tensor(p, arguments, state, walk).map(Some),
            None => Ok(None),
        }
    }
}

/// Charges the descriptions of so many parts of a tensor, which are all like the local tensor.
fn charge_parts(
    p: &Pickle<'_>,
    id: NodeId,
    local: &TensorRef,
    parts: usize,
    walk: &mut Walk,
) -> Result<(), FormatError> {
    Ok(walk.charge(
        p,
        id,
        "memory for shards",
        local.description_bytes().saturating_mul(parts as u64),
    )?)
}

/// Returns the items of a tuple or list, and charges a look at each.
fn items<'p>(p: &'p Pickle<'_>, id: NodeId, walk: &mut Walk) -> Result<&'p [NodeId], FormatError> {
    let items = p.sequence(id)?;
    walk.charge(p, id, "expanded size", items.len() as u64)?;
    Ok(items)
}

/// Returns the numbers in a tuple or list.
fn numbers(p: &Pickle<'_>, id: NodeId, walk: &mut Walk) -> Result<Vec<usize>, FormatError> {
    Ok(items(p, id, walk)?
        .iter()
        .map(|&item| p.usize(item))
        .collect::<Result<_, _>>()?)
}

fn malformed(reason: impl Into<String>) -> FormatError {
    FormatError::Malformed {
        what: "sharded tensor",
        reason: reason.into(),
    }
}

/// Returns dtype and shape of the whole tensor from the arguments `(class, dtype, size, …)`.
fn whole(p: &Pickle<'_>, arguments: NodeId) -> Result<(DType, Vec<usize>), FormatError> {
    let [_class, dtype, size, ..] = *p.sequence(arguments)? else {
        return Err(p
            .wrong(arguments, "the arguments of a tensor subclass")
            .into());
    };
    let Node::Global(Global::DType(dtype)) = *p.node(dtype) else {
        return Err(p.wrong(dtype, "a dtype").into());
    };
    let shape = p.sizes(size)?;
    if !is_sane_shape(&shape) {
        return Err(malformed("the whole tensor has too many elements"));
    }
    Ok((dtype, shape))
}

/// Returns the attributes in a state: a dict, or a tuple of a dict and a dict of slots, one of
/// which is `None` or empty.
///
/// Attributes are looked up by a linear search, and many tensors may share them. So each time they
/// are returned, all of them are charged.
fn attributes_in<'p>(
    p: &'p Pickle<'_>,
    state: NodeId,
    walk: &mut Walk,
) -> Result<Attributes<'p>, FormatError> {
    let attributes = match p.node(state) {
        Node::Tuple(_) => match *p.sequence(state)? {
            [first, slots] if *p.node(first) == Node::None => p.dict(slots)?,
            [first, slots] if *p.node(slots) == Node::None => p.dict(first)?,
            [first, slots] if p.dict(first).is_ok_and(<[_]>::is_empty) => p.dict(slots)?,
            _ => return Err(p.wrong(state, "the attributes of an object").into()),
        },
        _ => p.dict(state)?,
    };
    walk.charge(p, state, "expanded size", attributes.len() as u64)?;
    Ok(attributes)
}

/// Returns the attributes of an object.
fn attributes_of<'p>(
    p: &'p Pickle<'_>,
    id: NodeId,
    walk: &mut Walk,
) -> Result<Attributes<'p>, FormatError> {
    match p.node(id) {
        Node::Opaque(object) => object
            .state
            .map_or(Ok(&[][..]), |state| attributes_in(p, state, walk)),
        _ => Err(p.wrong(id, "an object").into()),
    }
}

/// Returns the value of an attribute; of several of one name, the last one counts.
fn find(p: &Pickle<'_>, attributes: Attributes<'_>, name: &str) -> Option<NodeId> {
    let found = attributes
        .iter()
        .rev()
        .find(|(key, _)| matches!(p.node(*key), Node::Str(key) if *key == name));
    found.map(|(_, value)| *value)
}

/// Returns the value of an attribute that must be there.
fn get(p: &Pickle<'_>, attributes: Attributes<'_>, name: &str) -> Result<NodeId, FormatError> {
    find(p, attributes, name).ok_or_else(|| malformed(format!("it has no `{name}`")))
}

/// Returns a size, or the product of a tuple of sizes.
fn product(p: &Pickle<'_>, id: NodeId, walk: &mut Walk) -> Result<usize, FormatError> {
    if let Ok(size) = p.usize(id) {
        return Ok(size);
    }
    // The items must be numbers: the tuples of a mesh are not nested any deeper.
    let sizes = numbers(p, id, walk)?;
    let total = sizes
        .iter()
        .try_fold(1usize, |total, &size| total.checked_mul(size));
    total.ok_or_else(|| malformed("its mesh is too large"))
}

/// Returns the shape of a mesh. Different versions of torch store it in different ways: as a tensor
/// of ranks, as a layout with a shape and strides, or as a layout of axes that each have a shape
/// and strides.
fn mesh_shape(
    p: &Pickle<'_>,
    mesh: Attributes<'_>,
    walk: &mut Walk,
) -> Result<Vec<usize>, FormatError> {
    let Some(layout) = find(p, mesh, "_layout") else {
        let ranks = get(p, mesh, "mesh")?;
        let ranks = TensorRef::of(p, ranks)?.ok_or_else(|| malformed("its mesh is no tensor"))?;
        return Ok(ranks.shape);
    };
    let attributes = attributes_of(p, layout, walk)?;
    if let Some(axes) = find(p, attributes, "axes") {
        let axes = items(p, axes, walk)?.iter();
        return axes
            .map(|&axis| {
                let attributes = attributes_of(p, axis, walk)?;
                product(p, get(p, attributes, "shape")?, walk)
            })
            .collect();
    }
    let shape = match (find(p, attributes, "shape"), p.node(layout)) {
        (Some(shape), _) => shape,
        (None, Node::Opaque(object)) => match p.sequence(object.args)? {
            [shape, ..] => *shape,
            [] => return Err(malformed("the layout of its mesh has no shape")),
        },
        _ => return Err(malformed("the layout of its mesh has no shape")),
    };
    match p.usize(shape) {
        Ok(size) => Ok(vec![size]),
        Err(_) => items(p, shape, walk)?
            .iter()
            .map(|&size| product(p, size, walk))
            .collect(),
    }
}

/// Reads a placement. A partial placement, whose parts would have to be summed, is an error.
fn placement(p: &Pickle<'_>, id: NodeId, walk: &mut Walk) -> Result<Placement, FormatError> {
    let Node::Opaque(object) = p.node(id) else {
        return Err(p.wrong(id, "a placement").into());
    };
    walk.charge(p, id, "expanded size", object.name.len() as u64)?;
    let attributes = attributes_of(p, id, walk)?;
    let number =
        |name: &str| -> Result<usize, FormatError> { Ok(p.usize(get(p, attributes, name)?)?) };
    match object.name.rsplit('.').next().unwrap_or_default() {
        "Shard" => Ok(Placement::Shard(number("dim")?)),
        "Replicate" => Ok(Placement::Replicate),
        "_StridedShard" => Ok(Placement::StridedShard {
            dim: number("dim")?,
            split_factor: number("split_factor")?,
        }),
        name => Err(FormatError::Unsupported {
            what: format!("the placement `{name}`"),
        }),
    }
}

/// Refuses shards whose placements were not applied in the order of the mesh dimensions.
fn check_order(
    p: &Pickle<'_>,
    spec: Attributes<'_>,
    placements: &[Placement],
    walk: &mut Walk,
) -> Result<(), FormatError> {
    let Some(order) = find(p, spec, "shard_order").filter(|&order| *p.node(order) != Node::None)
    else {
        return Ok(());
    };
    for &entry in items(p, order, walk)? {
        let entry = match p.node(entry) {
            Node::Opaque(object) => p.sequence(object.args)?,
            _ => p.sequence(entry)?,
        };
        let [dim, mesh_dims] = *entry else { continue };
        walk.charge(p, order, "expanded size", placements.len() as u64)?;
        let dim = p.usize(dim)?;
        let is_strided = placements
            .iter()
            .any(|of| matches!(of, Placement::StridedShard { dim: of, .. } if *of == dim));
        let mesh_dims = numbers(p, mesh_dims, walk)?;
        if !is_strided && !mesh_dims.is_sorted() {
            let what =
                format!("dimension {dim} sharded by mesh dimensions {mesh_dims:?} in that order");
            return Err(FormatError::Unsupported { what });
        }
    }
    Ok(())
}

/// Reads a DTensor. Its state has the local tensor and a specification: the placements, and the
/// mesh with the coordinate of the rank. The boxes of the rank follow from these as they do in
/// torch.
fn dtensor(
    p: &Pickle<'_>,
    arguments: NodeId,
    state: NodeId,
    walk: &mut Walk,
) -> Result<ShardedRef, FormatError> {
    let (dtype, shape) = whole(p, arguments)?;
    let attributes = attributes_in(p, state, walk)?;
    let local = get(p, attributes, "_local_tensor")?;
    let local = TensorRef::of(p, local)?.ok_or_else(|| malformed("its local part is no tensor"))?;
    let spec = attributes_of(p, get(p, attributes, "_spec")?, walk)?;
    let placements = items(p, get(p, spec, "placements")?, walk)?
        .iter()
        .map(|&id| placement(p, id, walk));
    let placements = placements.collect::<Result<Vec<_>, _>>()?;
    check_order(p, spec, &placements, walk)?;
    // A strided shard has a box for each block. Their number comes from the file, so it is limited.
    // One without blocks is an error later, and must not hide the blocks of others.
    let blocks = placements
        .iter()
        .try_fold(1usize, |blocks, placement| match placement {
            Placement::StridedShard { split_factor, .. } => {
                blocks.checked_mul((*split_factor).max(1))
            }
            _ => Some(blocks),
        });
    let Some(blocks) = blocks.filter(|&blocks| blocks <= MAX_PARTS) else {
        return Err(FormatError::Unsupported {
            what: format!("a strided shard of more than {MAX_PARTS} blocks"),
        });
    };
    // Each placement may cut every block.
    walk.charge(
        p,
        state,
        "expanded size",
        (placements.len() * blocks) as u64,
    )?;
    let mesh = attributes_of(p, get(p, spec, "mesh")?, walk)?;
    let mesh_shape = mesh_shape(p, mesh, walk)?;
    let coordinate = numbers(p, get(p, mesh, "_coordinate_on_dim")?, walk)?;
    if coordinate
        .iter()
        .zip(&mesh_shape)
        .any(|(at, size)| at >= size)
    {
        return Err(malformed("its rank lies outside its mesh"));
    }
    let ranks = mesh_shape
        .iter()
        .try_fold(1usize, |ranks, &size| ranks.checked_mul(size));
    let ranks = ranks.ok_or_else(|| malformed("its mesh is too large"))?;
    let boxes = boxes_of_placements(&shape, &placements, &mesh_shape, &coordinate)
        .map_err(|error| malformed(error.to_string()))?;
    charge_parts(p, state, &local, boxes.len(), walk)?;
    let parts = parts_of(&local, &boxes, &shape)?;
    if local.dtype != dtype {
        return Err(malformed("its local part has another dtype"));
    }
    Ok(ShardedRef {
        dtype,
        shape,
        parts,
        ranks,
    })
}

/// Cuts a local tensor into the boxes of the whole tensor that it holds, one after the other along
/// each dimension.
fn parts_of(
    local: &TensorRef,
    boxes: &[TensorBox],
    shape: &[usize],
) -> Result<Vec<TensorRef>, FormatError> {
    // The boxes are all combinations of ranges in each dimension.
    let mut starts: Vec<Vec<(usize, usize)>> = vec![Vec::new(); shape.len()];
    for bounds in boxes {
        for (dim, starts) in starts.iter_mut().enumerate() {
            let range = (bounds.offsets[dim], bounds.sizes[dim]);
            if !starts.contains(&range) {
                starts.push(range);
            }
        }
    }
    for (dim, starts) in starts.iter_mut().enumerate() {
        let mut at = 0;
        for (_, size) in starts.iter_mut() {
            // Keep the start of the range in the local tensor; its size is no longer needed.
            at += std::mem::replace(size, at);
        }
        let found = local.shape.get(dim).copied();
        if !boxes.is_empty() && (found != Some(at) || local.shape.len() != shape.len()) {
            let reason = format!(
                "its local part has shape {:?}, which does not fit its placements",
                local.shape
            );
            return Err(malformed(reason));
        }
    }
    if boxes.is_empty() && !local.shape.contains(&0) {
        return Err(malformed(
            "its local part has elements where its placements have none",
        ));
    }
    let part = |bounds: &TensorBox| {
        let mut offset = local.layout.offset;
        for (dim, starts) in starts.iter().enumerate() {
            let start = starts
                .iter()
                .find(|(global, _)| *global == bounds.offsets[dim])
                .map_or(0, |(_, at)| *at);
            offset += (start * local.layout.strides[dim]) as u64;
        }
        let layout = StridedLayout {
            bounds: bounds.clone(),
            offset,
            strides: local.layout.strides.clone(),
        };
        TensorRef {
            shape: bounds.sizes.clone(),
            layout,
            ..local.clone()
        }
    };
    Ok(boxes.iter().map(part).collect())
}

/// Reads FSDP1's state `(local shards, metadata, process group, sharding specification, …)`.
fn sharded_tensor(
    p: &Pickle<'_>,
    arguments: NodeId,
    state: NodeId,
    walk: &mut Walk,
) -> Result<ShardedRef, FormatError> {
    let (dtype, shape) = whole(p, arguments)?;
    let [shards, metadata, ..] = *p.sequence(state)? else {
        return Err(p.wrong(state, "the state of a ShardedTensor").into());
    };
    let all = p.sequence(get(
        p,
        attributes_of(p, metadata, walk)?,
        "shards_metadata",
    )?)?;
    let shards = items(p, shards, walk)?;
    if shards.len() > MAX_PARTS {
        return Err(FormatError::Unsupported {
            what: format!("a tensor of which one rank has more than {MAX_PARTS} shards"),
        });
    }
    let mut parts = Vec::new();
    for &id in shards {
        let shard = attributes_of(p, id, walk)?;
        let local = TensorRef::of(p, get(p, shard, "tensor")?)?;
        let local = local.ok_or_else(|| malformed("a shard is no tensor"))?;
        charge_parts(p, id, &local, 1, walk)?;
        let place = attributes_of(p, get(p, shard, "metadata")?, walk)?;
        let offsets = p.sizes(get(p, place, "shard_offsets")?)?;
        let bounds = TensorBox {
            offsets,
            sizes: p.sizes(get(p, place, "shard_sizes")?)?,
        };
        if !bounds.fits(&shape) || bounds.sizes != local.shape || local.dtype != dtype {
            return Err(malformed(format!(
                "a shard of shape {:?} does not fit its place",
                local.shape
            )));
        }
        if !bounds.is_empty() {
            let layout = StridedLayout {
                bounds,
                ..local.layout
            };
            parts.push(TensorRef { layout, ..local });
        }
    }
    Ok(ShardedRef {
        dtype,
        shape,
        parts,
        ranks: all.len(),
    })
}
