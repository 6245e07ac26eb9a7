//! Writing pickles: the few opcodes that torch's loaders accept, without a memo, so that equal values give equal bytes.
//!
//! Everything goes to a [`Sink`]: a `Vec<u8>`, or a [`Count`] that only measures. So the length of what would be written
//! is known without writing it.

/// Where pickle bytes go.
pub trait Sink {
    /// Takes the next bytes.
    fn put(&mut self, bytes: &[u8]);
}

impl Sink for Vec<u8> {
    fn put(&mut self, bytes: &[u8]) {
        self.extend_from_slice(bytes);
    }
}

/// A sink that only counts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Count(pub u64);

impl Sink for Count {
    fn put(&mut self, bytes: &[u8]) {
        self.0 += bytes.len() as u64;
    }
}

/// `(`
pub const MARK: u8 = b'(';
/// `)`
pub const EMPTY_TUPLE: u8 = b')';
/// Pops to the mark.
pub const TUPLE: u8 = b't';
/// `]`
pub const EMPTY_LIST: u8 = b']';
/// Pops to the mark.
pub const APPENDS: u8 = b'e';
/// `}`
pub const EMPTY_DICT: u8 = b'}';
/// Pops to the mark.
pub const SETITEMS: u8 = b'u';
/// Applies a global to a tuple.
pub const REDUCE: u8 = b'R';
/// Makes an object of a class and a tuple.
pub const NEWOBJ: u8 = 0x81;
/// Sets an object's state.
pub const BUILD: u8 = b'b';
/// Makes a persistent id of the value on top.
pub const BINPERSID: u8 = b'Q';
/// `None`
pub const NONE: u8 = b'N';
/// The end.
pub const STOP: u8 = b'.';

/// The opening bytes of a pickle.
pub fn proto(out: &mut impl Sink, protocol: u8) {
    out.put(&[0x80, protocol]);
}

/// One opcode without operands.
pub fn op(out: &mut impl Sink, opcode: u8) {
    out.put(&[opcode]);
}

/// `None`
pub fn none(out: &mut impl Sink) {
    op(out, NONE);
}

/// A bool.
pub fn bool(out: &mut impl Sink, value: bool) {
    op(out, if value { 0x88 } else { 0x89 });
}

/// An integer, in the shortest form.
pub fn int(out: &mut impl Sink, value: i64) {
    if let Ok(byte) = u8::try_from(value) {
        out.put(&[b'K', byte]);
    } else if let Ok(short) = u16::try_from(value) {
        let [a, b] = short.to_le_bytes();
        out.put(&[b'M', a, b]);
    } else if let Ok(word) = i32::try_from(value) {
        let [a, b, c, d] = word.to_le_bytes();
        out.put(&[b'J', a, b, c, d]);
    } else {
        let bytes = value.to_le_bytes();
        // The shortest two's complement that keeps the sign.
        let mut length = bytes.len();
        let fill = if value < 0 { 0xff } else { 0 };
        while length > 1 && bytes[length - 1] == fill && (bytes[length - 2] >= 0x80) == (value < 0) {
            length -= 1;
        }
        out.put(&[0x8a, length as u8]);
        out.put(&bytes[..length]);
    }
}

/// An unsigned integer.
pub fn unsigned(out: &mut impl Sink, value: u64) {
    match i64::try_from(value) {
        Ok(value) => int(out, value),
        Err(_) => {
            out.put(&[0x8a, 9]);
            out.put(&value.to_le_bytes());
            out.put(&[0]);
        }
    }
}

/// An integer of any length, as its little-endian two's-complement bytes.
pub fn big_int(out: &mut impl Sink, bytes: &[u8]) {
    match u8::try_from(bytes.len()) {
        Ok(length) => out.put(&[0x8a, length]),
        Err(_) => {
            out.put(&[0x8b]);
            out.put(&(bytes.len() as u32).to_le_bytes());
        }
    }
    out.put(bytes);
}

/// A float.
pub fn float(out: &mut impl Sink, value: f64) {
    out.put(b"G");
    out.put(&value.to_be_bytes());
}

/// Text, in a form that every protocol from 2 knows. (`BINUNICODE`; text of 4 GiB does not occur.)
pub fn text(out: &mut impl Sink, value: &str) {
    out.put(b"X");
    out.put(&(value.len() as u32).to_le_bytes());
    out.put(value.as_bytes());
}

/// Short text, protocol 4.
pub fn text4(out: &mut impl Sink, value: &str) {
    match u8::try_from(value.len()) {
        Ok(length) => {
            out.put(&[0x8c, length]);
            out.put(value.as_bytes());
        }
        Err(_) => text(out, value),
    }
}

/// A global in the textual form that every protocol knows.
pub fn global(out: &mut impl Sink, module: &str, name: &str) {
    out.put(b"c");
    out.put(module.as_bytes());
    out.put(b"\n");
    out.put(name.as_bytes());
    out.put(b"\n");
}

/// Closes a tuple of `count` items that were just written; [`open_tuple`] must have been called before them.
pub fn close_tuple(out: &mut impl Sink, count: usize) {
    match count {
        0 => op(out, EMPTY_TUPLE),
        1..=3 => op(out, 0x84 + count as u8),
        _ => op(out, TUPLE),
    }
}

/// Opens a tuple that will have `count` items.
pub fn open_tuple(out: &mut impl Sink, count: usize) {
    if count > 3 {
        op(out, MARK);
    }
}

/// A tuple of sizes.
pub fn sizes(out: &mut impl Sink, sizes: &[usize]) {
    open_tuple(out, sizes.len());
    for &size in sizes {
        unsigned(out, size as u64);
    }
    close_tuple(out, sizes.len());
}
