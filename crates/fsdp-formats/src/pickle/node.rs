//! A parsed pickle: an arena of nodes.

use std::borrow::Cow;
use std::sync::LazyLock;

use super::error::{PickleError, PickleErrorKind};
use super::global::Global;
use crate::budget::Budget;
use crate::limits::{MAX_ATTRIBUTES, MAX_TENSOR_RANK, check_limit};

/// The number of a node: one that all pickles share, or, after those, one of its [`Pickle`]'s own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct NodeId(pub(super) u32);

/// One value of a pickle.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Node<'a> {
    /// `None`
    None,
    /// `True` or `False`
    Bool(bool),
    /// An integer of 64 bits.
    Int(i64),
    /// A longer integer: two's complement, little-endian.
    BigInt(&'a [u8]),
    /// A float.
    Float(f64),
    /// Text, borrowed from the pickle.
    Str(&'a str),
    /// Bytes; borrowed, unless they were spelled as text (protocol 2).
    Bytes(Cow<'a, [u8]>),
    /// A bytearray.
    ByteArray(Cow<'a, [u8]>),
    /// `(…)`; its items are those of [`Pickle::sequence`].
    Tuple(TupleNode),
    /// `[…]`
    List(Vec<NodeId>),
    /// A set.
    Set(Vec<NodeId>),
    /// A frozenset.
    FrozenSet(Vec<NodeId>),
    /// A dict (or `OrderedDict`, `defaultdict`), in insertion order.
    Dict(Vec<(NodeId, NodeId)>),
    /// A class or function that is itself the value.
    Global(Global),
    /// A class or function and the arguments to which it would have been applied; nothing was
    /// called.
    Object(ObjectNode),
    /// A persistent id: in torch files, a storage.
    PersistentId(NodeId),
    /// A class or function that is not on the list of known ones, itself the value: its module and
    /// its name.
    Foreign(&'a str, &'a str),
    /// An object of an unknown class, or the result of an unknown function. Its description is
    /// kept, and it is never built.
    Opaque(Box<OpaqueNode<'a>>),
}

/// See [`Node::Opaque`].
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct OpaqueNode<'a> {
    /// The module of the class or function.
    pub(crate) module: &'a str,
    /// Its qualified name.
    pub(crate) name: &'a str,
    /// Its positional arguments: a tuple.
    pub(crate) args: NodeId,
    /// The state that `BUILD` would have set on it.
    pub(crate) state: Option<NodeId>,
    /// The items that would have been appended to it.
    pub(crate) items: Vec<NodeId>,
    /// The entries that would have been set in it.
    pub(crate) entries: Vec<(NodeId, NodeId)>,
}

/// See [`Node::Tuple`]: a range in one list of the items of all tuples. That saves an allocation
/// for each of many small tuples.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TupleNode {
    pub(super) start: u32,
    pub(super) len: u32,
}

/// See [`Node::Object`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct ObjectNode {
    /// The class or function.
    pub(crate) global: Global,
    /// Its positional arguments: a tuple. See [`Pickle::args`].
    pub(crate) args: NodeId,
    /// The state that `BUILD` would have set on it.
    pub(crate) state: Option<NodeId>,
}

impl Node<'_> {
    /// Returns Python's name of the kind of value, for messages.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Node::None => "None",
            Node::Bool(_) => "a bool",
            Node::Int(_) | Node::BigInt(_) => "an int",
            Node::Float(_) => "a float",
            Node::Str(_) => "a str",
            Node::Bytes(_) => "bytes",
            Node::ByteArray(_) => "a bytearray",
            Node::Tuple(_) => "a tuple",
            Node::List(_) => "a list",
            Node::Set(_) => "a set",
            Node::FrozenSet(_) => "a frozenset",
            Node::Dict(_) => "a dict",
            Node::Global(_) => "a global",
            Node::Object(_) => "an object",
            Node::PersistentId(_) => "a persistent id",
            Node::Foreign(..) => "an unknown global",
            Node::Opaque(_) => "an object of an unknown type",
        }
    }

    /// Makes the error of a place that needs another kind of value.
    pub(super) fn mismatch(&self, expected: &'static str) -> PickleErrorKind {
        PickleErrorKind::Kind {
            expected,
            found: self.kind(),
        }
    }
}

/// The nodes that all pickles share: `None`, `True`, `False`, and the integers of one byte, which
/// are most of a checkpoint's sizes and offsets. Their numbers come before those of a pickle's own
/// nodes.
static SHARED: LazyLock<[Node<'static>; SHARED_NODES]> = LazyLock::new(|| {
    std::array::from_fn(|index| match index {
        0 => Node::None,
        1 => Node::Bool(true),
        2 => Node::Bool(false),
        index => Node::Int(index as i64 - i64::from(small_int(0).0)),
    })
});
/// The number of nodes in [`SHARED`].
const SHARED_NODES: usize = 3 + 256;

/// The shared node of `None`.
pub(super) const NONE: NodeId = NodeId(0);
/// The shared node of `True`.
pub(super) const TRUE: NodeId = NodeId(1);
/// The shared node of `False`.
pub(super) const FALSE: NodeId = NodeId(2);

/// Returns the shared node of a small integer.
pub(super) const fn small_int(value: u8) -> NodeId {
    NodeId(3 + value as u32)
}

/// Returns the number of a pickle's own node at this position in its arena.
pub(super) const fn own_node(position: usize) -> NodeId {
    NodeId((SHARED_NODES + position) as u32)
}

/// Returns the position of a node in the arena of its pickle; `None` if it is a shared one.
pub(super) const fn arena_position(id: NodeId) -> Option<usize> {
    (id.0 as usize).checked_sub(SHARED_NODES)
}

/// A parsed pickle.
#[derive(Debug)]
pub struct Pickle<'a> {
    /// Its own nodes. Other ones are shared by all pickles.
    pub(super) nodes: Vec<Node<'a>>,
    /// The position in the pickle of the opcode that made each of these nodes.
    pub(super) offsets: Vec<u32>,
    /// The items of all tuples, one tuple after the other.
    pub(super) items: Vec<NodeId>,
    pub(super) root: NodeId,
    /// The position after its `STOP`.
    pub(super) end: usize,
    /// The remaining budget, for values that are built from the nodes.
    pub(super) budget: Budget,
}

impl<'a> Pickle<'a> {
    /// Returns the value that the pickle holds.
    #[must_use]
    pub fn root(&self) -> NodeId {
        self.root
    }

    /// Returns the length of the pickle in bytes. Other data may follow it.
    pub(crate) fn end(&self) -> usize {
        self.end
    }

    /// Returns the persistent ids, in the order in which they were made.
    pub(crate) fn persistent_ids(&self) -> impl Iterator<Item = NodeId> {
        self.nodes.iter().filter_map(|node| match node {
            Node::PersistentId(id) => Some(*id),
            _ => None,
        })
    }

    /// Returns the node of this number.
    pub(crate) fn node(&self, id: NodeId) -> &Node<'a> {
        match arena_position(id) {
            // Ids are made by the parser only, and the arena never shrinks.
            Some(position) => &self.nodes[position],
            None => &SHARED[id.0 as usize],
        }
    }

    /// Makes an error at the place where this node was made, or at the beginning of the pickle for
    /// a shared node.
    pub(crate) fn error(&self, id: NodeId, kind: PickleErrorKind) -> PickleError {
        kind.at(arena_position(id).map_or(0, |position| self.offsets[position] as usize))
    }

    /// Makes the error of a node that is not of the expected kind.
    pub(crate) fn expected_error(&self, id: NodeId, expected: &'static str) -> PickleError {
        let kind = match self.node(id) {
            Node::Foreign(module, name) => foreign_error(module, name),
            Node::Opaque(object) => foreign_error(object.module, object.name),
            other => other.mismatch(expected),
        };
        self.error(id, kind)
    }

    /// Makes the error of a node of the right kind that is not valid.
    pub(crate) fn invalid_error(
        &self,
        id: NodeId,
        what: impl Into<Cow<'static, str>>,
    ) -> PickleError {
        self.error(id, PickleErrorKind::Value { what: what.into() })
    }

    /// Makes the error of an object of torch's that only running code could build.
    pub(crate) fn opaque_error(&self, id: NodeId, name: impl Into<String>) -> PickleError {
        let kind = PickleErrorKind::Global {
            module: "torch".to_owned(),
            name: name.into(),
        };
        self.error(id, kind)
    }

    /// Refuses a length or count of what this node holds, if it is beyond its limit.
    pub(crate) fn check_limit(
        &self,
        id: NodeId,
        what: &'static str,
        length: usize,
        limit: usize,
    ) -> Result<(), PickleError> {
        check_limit(what, length as u64, limit as u64)
            .map_err(|beyond| self.error(id, beyond.into()))
    }

    /// Returns the node as text; any other node is an error, as in the functions below.
    pub(crate) fn str(&self, id: NodeId) -> Result<&'a str, PickleError> {
        match self.node(id) {
            Node::Str(text) => Ok(text),
            _ => Err(self.expected_error(id, "a str")),
        }
    }

    /// Returns the node as an integer.
    pub(crate) fn int(&self, id: NodeId) -> Result<i64, PickleError> {
        match self.node(id) {
            Node::Int(value) => Ok(*value),
            _ => Err(self.expected_error(id, "an int of 64 bits")),
        }
    }

    /// Returns the node as a count or a position: an integer that is not negative.
    pub(crate) fn unsigned(&self, id: NodeId) -> Result<u64, PickleError> {
        u64::try_from(self.int(id)?)
            .map_err(|_| self.invalid_error(id, "a size or position is negative"))
    }

    /// Returns the node as a count or a position of this machine's size.
    pub(crate) fn usize(&self, id: NodeId) -> Result<usize, PickleError> {
        usize::try_from(self.unsigned(id)?)
            .map_err(|_| self.invalid_error(id, "a size does not fit this machine"))
    }

    /// Returns the node as a bool.
    pub(crate) fn bool(&self, id: NodeId) -> Result<bool, PickleError> {
        match self.node(id) {
            Node::Bool(value) => Ok(*value),
            _ => Err(self.expected_error(id, "a bool")),
        }
    }

    /// Returns the entries of a dict.
    pub(crate) fn dict(&self, id: NodeId) -> Result<&[(NodeId, NodeId)], PickleError> {
        match self.node(id) {
            Node::Dict(entries) => Ok(entries),
            _ => Err(self.expected_error(id, "a dict")),
        }
    }

    /// Returns the items of a tuple or a list.
    pub(crate) fn sequence(&self, id: NodeId) -> Result<&[NodeId], PickleError> {
        match self.node(id) {
            Node::Tuple(tuple) => Ok(self.tuple(*tuple)),
            Node::List(items) => Ok(items),
            _ => Err(self.expected_error(id, "a tuple or list")),
        }
    }

    /// Returns the node as an object.
    pub(crate) fn object(&self, id: NodeId) -> Result<&ObjectNode, PickleError> {
        match self.node(id) {
            Node::Object(object) => Ok(object),
            _ => Err(self.expected_error(id, "an object")),
        }
    }

    /// Returns the positional arguments of an object.
    pub(crate) fn args(&self, object: &ObjectNode) -> &[NodeId] {
        match self.node(object.args) {
            Node::Tuple(tuple) => self.tuple(*tuple),
            _ => unreachable!("the parser refuses arguments that are no tuple"),
        }
    }

    /// Returns the items of a tuple.
    pub(super) fn tuple(&self, tuple: TupleNode) -> &[NodeId] {
        &self.items[tuple.start as usize..(tuple.start + tuple.len) as usize]
    }

    /// Returns `true` if the node is an object of this global.
    pub(crate) fn is_object(&self, id: NodeId, global: Global) -> bool {
        matches!(self.node(id), Node::Object(object) if object.global == global)
    }

    /// Returns the attributes of an object of this class, as `BUILD` would have set them.
    pub(crate) fn state(
        &self,
        id: NodeId,
        class: Global,
        expected: &'static str,
    ) -> Result<Fields<'_, 'a>, PickleError> {
        match self.node(id) {
            Node::Object(object) if object.global == class => {
                let mut entries: &[_] = &[];
                if let Some(state) = object.state {
                    entries = self.dict(state)?;
                    check_attributes(self.node(state)).map_err(|kind| self.error(id, kind))?;
                }
                Ok(self.fields(id, entries))
            }
            _ => Err(self.expected_error(id, expected)),
        }
    }

    /// Returns these entries of a dict as the attributes of an object.
    pub(crate) fn fields<'p>(
        &'p self,
        object: NodeId,
        entries: &'p [(NodeId, NodeId)],
    ) -> Fields<'p, 'a> {
        Fields {
            pickle: self,
            object,
            entries,
        }
    }

    /// Returns the node as sizes: a `torch.Size`, or a tuple or list.
    pub(crate) fn sizes(&self, id: NodeId) -> Result<Vec<usize>, PickleError> {
        let items = match self.node(id) {
            Node::Object(object) if object.global == Global::Size => match self.args(object) {
                [] => &[],
                [items] => self.sequence(*items)?,
                _ => return Err(self.expected_error(id, "a torch.Size of one tuple")),
            },
            _ => self.sequence(id)?,
        };
        self.check_limit(id, "number of dimensions", items.len(), MAX_TENSOR_RANK)?;
        items.iter().map(|&item| self.usize(item)).collect()
    }
}

/// Returns the error of a place that cannot use an object of this class, or the result of this
/// function.
fn foreign_error(module: &str, name: &str) -> PickleErrorKind {
    PickleErrorKind::Global {
        module: shorten(module),
        name: shorten(name),
    }
}

/// Returns a name for an error message, of which no more is left than a line can hold.
fn shorten(name: &str) -> String {
    const MAX_CHARACTERS: usize = 120;
    match name.char_indices().nth(MAX_CHARACTERS) {
        Some((end, _)) => format!("{}…", &name[..end]),
        None => name.to_owned(),
    }
}

/// Checks that an object does not have too many attributes, because looking one up is a linear
/// search.
pub(crate) fn check_attributes(state: &Node<'_>) -> Result<(), PickleErrorKind> {
    match state {
        Node::Dict(entries) => {
            let limit = MAX_ATTRIBUTES as u64;
            Ok(check_limit(
                "number of attributes",
                entries.len() as u64,
                limit,
            )?)
        }
        _ => Ok(()),
    }
}

/// The attributes of an object.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fields<'p, 'a> {
    pickle: &'p Pickle<'a>,
    /// The object, for errors.
    object: NodeId,
    pub(crate) entries: &'p [(NodeId, NodeId)],
}

impl Fields<'_, '_> {
    /// Returns the attribute of this name, if it exists; the last one if there are several.
    pub(crate) fn find(&self, field: &str) -> Option<NodeId> {
        self.entries
            .iter()
            .rev()
            .find(|(key, _)| matches!(self.pickle.node(*key), Node::Str(name) if *name == field))
            .map(|(_, value)| *value)
    }

    /// Returns the attribute of this name, if it exists and is not `None`.
    pub(crate) fn find_some(&self, field: &str) -> Option<NodeId> {
        self.find(field)
            .filter(|&value| *self.pickle.node(value) != Node::None)
    }

    /// Returns the attribute of this name; it is an error if it does not exist.
    pub(crate) fn get(&self, field: &'static str) -> Result<NodeId, PickleError> {
        self.find(field).ok_or_else(|| {
            self.pickle
                .error(self.object, PickleErrorKind::Field { field })
        })
    }
}
