//! Parses a rank's part of a tensor in a pickle: a DTensor with its mesh and placements, or FSDP1's
//! ShardedTensor with its shards.
//!
//! Both are tensor subclasses: `_rebuild_from_type_v2(_rebuild_wrapper_subclass, class, arguments,
//! state)`, where the arguments are those of the whole tensor and the state holds the local parts.

use fsdp_layout::placement::boxes_of_placements;
use fsdp_layout::{DType, Placement, TensorBox};

use super::Result;
use super::tensor_ref::{MAX_WRAPPERS, TensorRef};
use crate::error::FormatError;
use crate::limits::is_sane_shape;
use crate::pickle::{Fields, Global, Node, NodeId, Pickle, Walk};
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

/// The largest number of parts of one tensor that a rank may have. A strided shard has a part for
/// each of its blocks.
const MAX_PARTS: usize = 1024;

/// Returns the class, the arguments and the state of a sharded tensor; `None` if this node is not
/// one.
fn find_subclass<'p>(pickle: &'p Pickle<'_>, mut id: NodeId) -> Option<(&'p str, NodeId, NodeId)> {
    for _ in 0..MAX_WRAPPERS {
        let Node::Object(object) = pickle.node(id) else {
            return None;
        };
        match (object.global, pickle.args(object)) {
            // A parameter wraps its tensor.
            (Global::RebuildParameter, [inner, ..]) => id = *inner,
            (Global::RebuildFromTypeV2, [function, class, arguments, state]) => {
                return match (pickle.node(*function), pickle.node(*class)) {
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
pub(crate) fn is_sharded(pickle: &Pickle<'_>, id: NodeId) -> bool {
    find_subclass(pickle, id).is_some()
}

impl ShardedRef {
    /// Returns the part of a tensor that this node describes; `None` if it describes something
    /// else. Many tensors may share lists and attributes, so each look through them is charged to
    /// the walk.
    pub(crate) fn from_node(walk: &mut Walk<'_, '_>, id: NodeId) -> Result<Option<Self>> {
        match find_subclass(walk.pickle, id) {
            Some(("DTensor", arguments, state)) => read_dtensor(walk, arguments, state).map(Some),
            Some((_, arguments, state)) => read_sharded_tensor(walk, arguments, state).map(Some),
            None => Ok(None),
        }
    }
}

/// Charges the descriptions of so many parts of a tensor, which are all like the local tensor.
fn charge_parts(
    walk: &mut Walk<'_, '_>,
    id: NodeId,
    local: &TensorRef,
    parts: usize,
) -> Result<()> {
    let bytes = local.description_bytes().saturating_mul(parts as u64);
    Ok(walk.charge(id, "memory for shards", bytes)?)
}

/// Returns the items of a tuple or list, and charges a look at each.
fn read_items<'p>(walk: &mut Walk<'p, '_>, id: NodeId) -> Result<&'p [NodeId]> {
    let items = walk.pickle.sequence(id)?;
    walk.charge(id, "expanded size", items.len() as u64)?;
    Ok(items)
}

/// Returns the numbers in a tuple or list.
fn read_numbers(walk: &mut Walk<'_, '_>, id: NodeId) -> Result<Vec<usize>> {
    let numbers = read_items(walk, id)?
        .iter()
        .map(|&item| walk.pickle.usize(item));
    Ok(numbers.collect::<Result<_, _>>()?)
}

/// Makes the error of a sharded tensor that is not what it should be.
fn malformed(reason: impl ToString) -> FormatError {
    FormatError::malformed("sharded tensor", reason)
}

/// Returns dtype and shape of the whole tensor from the arguments `(class, dtype, size, …)`. A
/// shape that no tensor can have is an error.
fn read_whole_tensor(pickle: &Pickle<'_>, arguments: NodeId) -> Result<(DType, Vec<usize>)> {
    let [_class, dtype, size, ..] = *pickle.sequence(arguments)? else {
        return Err(pickle
            .expected_error(arguments, "the arguments of a tensor subclass")
            .into());
    };
    let Node::Global(Global::DType(dtype)) = *pickle.node(dtype) else {
        return Err(pickle.expected_error(dtype, "a dtype").into());
    };
    let shape = pickle.sizes(size)?;
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
fn attributes_in<'p, 'a>(walk: &mut Walk<'p, 'a>, state: NodeId) -> Result<Fields<'p, 'a>> {
    let pickle = walk.pickle;
    let entries = match pickle.node(state) {
        Node::Tuple(_) => match *pickle.sequence(state)? {
            [dict, slots] if *pickle.node(dict) == Node::None => pickle.dict(slots)?,
            [dict, slots] if *pickle.node(slots) == Node::None => pickle.dict(dict)?,
            [dict, slots] if pickle.dict(dict).is_ok_and(<[_]>::is_empty) => pickle.dict(slots)?,
            _ => {
                return Err(pickle
                    .expected_error(state, "the attributes of an object")
                    .into());
            }
        },
        _ => pickle.dict(state)?,
    };
    walk.charge(state, "expanded size", entries.len() as u64)?;
    Ok(pickle.fields(state, entries))
}

/// Returns the attributes in the state of an object of an unknown class: none if it has no state.
/// Any other node is an error.
fn attributes_of<'p, 'a>(walk: &mut Walk<'p, 'a>, id: NodeId) -> Result<Fields<'p, 'a>> {
    match walk.pickle.node(id) {
        Node::Opaque(object) => match object.state {
            Some(state) => attributes_in(walk, state),
            None => Ok(walk.pickle.fields(id, &[])),
        },
        _ => Err(walk
            .pickle
            .expected_error(id, "an object with attributes")
            .into()),
    }
}

/// Returns the value of an attribute that must be there.
fn get_attribute(attributes: Fields<'_, '_>, name: &str) -> Result<NodeId> {
    attributes
        .find(name)
        .ok_or_else(|| malformed(format!("it has no `{name}`")))
}

/// Returns the tensor that this node describes, which is the `part` of a sharded one.
fn read_plain_tensor(pickle: &Pickle<'_>, id: NodeId, part: &str) -> Result<TensorRef> {
    TensorRef::from_node(pickle, id)?.ok_or_else(|| malformed(format!("{part} is no tensor")))
}

/// Returns the product of the sizes of a mesh.
fn mesh_size(sizes: &[usize]) -> Result<usize> {
    sizes
        .iter()
        .try_fold(1usize, |total, &size| total.checked_mul(size))
        .ok_or_else(|| malformed("its mesh is too large"))
}

/// Returns a size, or the product of a tuple of sizes.
fn read_product(walk: &mut Walk<'_, '_>, id: NodeId) -> Result<usize> {
    match walk.pickle.usize(id) {
        Ok(size) => Ok(size),
        // The items must be numbers: the tuples of a mesh are not nested any deeper.
        Err(_) => mesh_size(&read_numbers(walk, id)?),
    }
}

/// Returns the shape of a mesh. Different versions of torch store it in different ways: as a tensor
/// of ranks, as a layout with a shape and strides, or as a layout of axes that each have a shape
/// and strides.
fn read_mesh_shape(walk: &mut Walk<'_, '_>, mesh: Fields<'_, '_>) -> Result<Vec<usize>> {
    let pickle = walk.pickle;
    let Some(layout) = mesh.find("_layout") else {
        return Ok(read_plain_tensor(pickle, get_attribute(mesh, "mesh")?, "its mesh")?.shape);
    };
    let attributes = attributes_of(walk, layout)?;
    if let Some(axes) = attributes.find("axes") {
        let mut shape = Vec::new();
        for &axis in read_items(walk, axes)? {
            let size = get_attribute(attributes_of(walk, axis)?, "shape")?;
            shape.push(read_product(walk, size)?);
        }
        return Ok(shape);
    }
    // An older layout is a tuple of its shape and its strides.
    let shape = match (attributes.find("shape"), pickle.node(layout)) {
        (Some(shape), _) => Some(shape),
        (None, Node::Opaque(object)) => pickle.sequence(object.args)?.first().copied(),
        (None, _) => None,
    }
    .ok_or_else(|| malformed("the layout of its mesh has no shape"))?;
    if let Ok(size) = pickle.usize(shape) {
        return Ok(vec![size]);
    }
    let mut sizes = Vec::new();
    for &size in read_items(walk, shape)? {
        sizes.push(read_product(walk, size)?);
    }
    Ok(sizes)
}

/// Reads a placement. A partial placement, whose parts would have to be summed, is an error.
fn read_placement(walk: &mut Walk<'_, '_>, id: NodeId) -> Result<Placement> {
    let pickle = walk.pickle;
    let Node::Opaque(object) = pickle.node(id) else {
        return Err(pickle.expected_error(id, "a placement").into());
    };
    walk.charge(id, "expanded size", object.name.len() as u64)?;
    let attributes = attributes_of(walk, id)?;
    let class = object
        .name
        .rsplit_once('.')
        .map_or(object.name, |(_, class)| class);
    Ok(match class {
        "Shard" => Placement::Shard(pickle.usize(get_attribute(attributes, "dim")?)?),
        "Replicate" => Placement::Replicate,
        "_StridedShard" => Placement::StridedShard {
            dim: pickle.usize(get_attribute(attributes, "dim")?)?,
            split_factor: pickle.usize(get_attribute(attributes, "split_factor")?)?,
        },
        name => {
            return Err(FormatError::unsupported(format!("the placement `{name}`")));
        }
    })
}

/// Refuses shards whose placements were not applied in the order of the mesh dimensions, except for
/// strided shards.
fn check_order(
    walk: &mut Walk<'_, '_>,
    spec: Fields<'_, '_>,
    placements: &[Placement],
) -> Result<()> {
    let pickle = walk.pickle;
    let Some(order) = spec.find_some("shard_order") else {
        return Ok(());
    };
    for &entry in read_items(walk, order)? {
        let dim_and_mesh_dims = match pickle.node(entry) {
            Node::Opaque(object) => pickle.sequence(object.args)?,
            _ => pickle.sequence(entry)?,
        };
        let [dim, mesh_dims] = *dim_and_mesh_dims else {
            continue;
        };
        walk.charge(order, "expanded size", placements.len() as u64)?;
        let dim = pickle.usize(dim)?;
        // A strided shard says its order itself.
        let is_strided = placements
            .iter()
            .any(|placement| matches!(placement, Placement::StridedShard { dim: strided, .. } if *strided == dim));
        let mesh_dims = read_numbers(walk, mesh_dims)?;
        if !is_strided && !mesh_dims.is_sorted() {
            let what =
                format!("dimension {dim} sharded by mesh dimensions {mesh_dims:?} in that order");
            return Err(FormatError::unsupported(what));
        }
    }
    Ok(())
}

/// Reads a DTensor. Its state has the local tensor and a specification: the placements, and the
/// mesh with the coordinate of the rank. The boxes of the rank follow from these as they do in
/// torch; there is an error if the local tensor does not fit them.
fn read_dtensor(walk: &mut Walk<'_, '_>, arguments: NodeId, state: NodeId) -> Result<ShardedRef> {
    let pickle = walk.pickle;
    let (dtype, shape) = read_whole_tensor(pickle, arguments)?;
    let attributes = attributes_in(walk, state)?;
    let local = read_plain_tensor(
        pickle,
        get_attribute(attributes, "_local_tensor")?,
        "its local part",
    )?;
    let spec = attributes_of(walk, get_attribute(attributes, "_spec")?)?;
    let mut placements = Vec::new();
    for &id in read_items(walk, get_attribute(spec, "placements")?)? {
        placements.push(read_placement(walk, id)?);
    }
    check_order(walk, spec, &placements)?;
    let blocks = count_blocks(&placements)?;
    // Each placement may cut every block.
    walk.charge(state, "expanded size", (placements.len() * blocks) as u64)?;
    // The place of this rank in the mesh, from which its part of the tensor follows.
    let mesh = attributes_of(walk, get_attribute(spec, "mesh")?)?;
    let mesh_shape = read_mesh_shape(walk, mesh)?;
    let coordinate = read_numbers(walk, get_attribute(mesh, "_coordinate_on_dim")?)?;
    if coordinate
        .iter()
        .zip(&mesh_shape)
        .any(|(index, size)| index >= size)
    {
        return Err(malformed("its rank lies outside its mesh"));
    }
    let ranks = mesh_size(&mesh_shape)?;
    let boxes =
        boxes_of_placements(&shape, &placements, &mesh_shape, &coordinate).map_err(malformed)?;
    charge_parts(walk, state, &local, boxes.len())?;
    let parts = cut_into_boxes(&local, &boxes, &shape)?;
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

/// Returns the number of blocks that strided shards are made of. A strided shard has a box for each
/// block, and their number comes from a file, so too many are an error.
fn count_blocks(placements: &[Placement]) -> Result<usize> {
    // One without blocks is an error later, and must not hide the blocks of others.
    let mut blocks = 1usize;
    for placement in placements {
        if let Placement::StridedShard { split_factor, .. } = placement {
            blocks = blocks.saturating_mul((*split_factor).max(1));
        }
    }
    if blocks > MAX_PARTS {
        let what = format!("a strided shard of more than {MAX_PARTS} blocks");
        return Err(FormatError::unsupported(what));
    }
    Ok(blocks)
}

/// Cuts a plain local tensor into the boxes of a whole tensor of this shape that a rank of a mesh
/// holds by these placements. A local tensor that does not fit them is an error.
pub(crate) fn cut_by_placements(
    local: &TensorRef,
    shape: &[usize],
    placements: &[Placement],
    mesh_shape: &[usize],
    coordinate: &[usize],
) -> Result<Vec<TensorRef>> {
    count_blocks(placements)?;
    let boxes =
        boxes_of_placements(shape, placements, mesh_shape, coordinate).map_err(malformed)?;
    cut_into_boxes(local, &boxes, shape)
}

/// Cuts a local tensor into the boxes of the whole tensor that it holds, one after the other along
/// each dimension. A local tensor whose shape does not fit them is an error.
fn cut_into_boxes(
    local: &TensorRef,
    boxes: &[TensorBox],
    shape: &[usize],
) -> Result<Vec<TensorRef>> {
    if boxes.is_empty() {
        if !local.shape.contains(&0) {
            let reason = "its local part has elements where its placements have none";
            return Err(malformed(reason));
        }
        return Ok(Vec::new());
    }
    // The boxes are all combinations of ranges in each dimension, and the local tensor has those of
    // a dimension one after the other: `starts` has each range's start in the whole tensor, with
    // its start in the local one.
    let mut starts: Vec<Vec<(usize, usize)>> = vec![Vec::new(); shape.len()];
    let mut local_shape = vec![0; shape.len()];
    for bounds in boxes {
        for (dim, starts) in starts.iter_mut().enumerate() {
            let offset = bounds.offsets[dim];
            if starts
                .iter()
                .all(|(tensor_start, _)| *tensor_start != offset)
            {
                starts.push((offset, local_shape[dim]));
                local_shape[dim] += bounds.sizes[dim];
            }
        }
    }
    if local.shape != local_shape {
        let reason = format!(
            "its local part has shape {:?}, which does not fit its placements",
            local.shape
        );
        return Err(malformed(reason));
    }
    let mut parts = Vec::with_capacity(boxes.len());
    for bounds in boxes {
        let mut layout = StridedLayout {
            bounds: bounds.clone(),
            ..local.layout.clone()
        };
        for (dim, starts) in starts.iter().enumerate() {
            let (_, local_start) = starts
                .iter()
                .find(|(tensor_start, _)| *tensor_start == bounds.offsets[dim])
                .expect("the ranges of all boxes were collected above");
            layout.offset += (local_start * local.layout.strides[dim]) as u64;
        }
        parts.push(TensorRef {
            shape: bounds.sizes.clone(),
            layout,
            ..local.clone()
        });
    }
    Ok(parts)
}

/// Reads FSDP1's state `(local shards, metadata, process group, sharding specification, …)`. Empty
/// shards are left out; one that does not fit its place is an error.
fn read_sharded_tensor(
    walk: &mut Walk<'_, '_>,
    arguments: NodeId,
    state: NodeId,
) -> Result<ShardedRef> {
    let pickle = walk.pickle;
    let (dtype, shape) = read_whole_tensor(pickle, arguments)?;
    let [shards, metadata, ..] = *pickle.sequence(state)? else {
        return Err(pickle
            .expected_error(state, "the state of a ShardedTensor")
            .into());
    };
    let ranks = pickle
        .sequence(get_attribute(
            attributes_of(walk, metadata)?,
            "shards_metadata",
        )?)?
        .len();
    let shards = read_items(walk, shards)?;
    if shards.len() > MAX_PARTS {
        let what = format!("a tensor of which one rank has more than {MAX_PARTS} shards");
        return Err(FormatError::unsupported(what));
    }
    let mut parts = Vec::new();
    for &id in shards {
        let shard = attributes_of(walk, id)?;
        let local = read_plain_tensor(pickle, get_attribute(shard, "tensor")?, "a shard")?;
        charge_parts(walk, id, &local, 1)?;
        let metadata_of_shard = attributes_of(walk, get_attribute(shard, "metadata")?)?;
        let bounds = TensorBox {
            offsets: pickle.sizes(get_attribute(metadata_of_shard, "shard_offsets")?)?,
            sizes: pickle.sizes(get_attribute(metadata_of_shard, "shard_sizes")?)?,
        };
        if !bounds.fits(&shape) || bounds.sizes != local.shape || local.dtype != dtype {
            return Err(malformed(format!(
                "a shard of shape {:?} does not fit its place",
                local.shape
            )));
        }
        // A rank without a part of the tensor has an empty shard.
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
        ranks,
    })
}
