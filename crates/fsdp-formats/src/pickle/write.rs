//! Writing pickles: the few opcodes that torch's loaders accept, without a memo, so that equal
//! values give equal bytes.

/// Marks the top of the stack.
pub const MARK: u8 = b'(';
/// Makes an empty tuple.
pub(crate) const EMPTY_TUPLE: u8 = b')';
/// Makes a tuple of all above the mark.
pub(crate) const TUPLE: u8 = b't';
/// Makes an empty list.
pub const EMPTY_LIST: u8 = b']';
/// Appends all above the mark to the list below it.
pub const APPENDS: u8 = b'e';
/// Makes an empty dict.
pub const EMPTY_DICT: u8 = b'}';
/// Adds the pairs above the mark to the dict below it.
pub const SETITEMS: u8 = b'u';
/// Applies a global to a tuple of arguments.
pub(crate) const REDUCE: u8 = b'R';
/// Makes an object of a class and a tuple of arguments.
pub(crate) const NEWOBJ: u8 = 0x81;
/// Sets an object's state.
pub(crate) const BUILD: u8 = b'b';
/// Makes a persistent id of the value on top.
pub(crate) const BINPERSID: u8 = b'Q';
/// Makes `None`.
pub(crate) const NONE: u8 = b'N';
/// Ends the pickle, whose value is on top.
pub const STOP: u8 = b'.';

/// Writes the opening bytes of a pickle.
pub fn proto(out: &mut Vec<u8>, protocol: u8) {
    out.extend_from_slice(&[0x80, protocol]);
}

/// Writes a bool.
pub(crate) fn bool(out: &mut Vec<u8>, value: bool) {
    out.push(if value { 0x88 } else { 0x89 });
}

/// Writes an integer, in the shortest form.
pub(crate) fn int(out: &mut Vec<u8>, value: i64) {
    if let Ok(byte) = u8::try_from(value) {
        out.extend_from_slice(&[b'K', byte]);
    } else if let Ok(short) = u16::try_from(value) {
        out.push(b'M');
        out.extend_from_slice(&short.to_le_bytes());
    } else if let Ok(word) = i32::try_from(value) {
        out.push(b'J');
        out.extend_from_slice(&word.to_le_bytes());
    } else {
        let bytes = value.to_le_bytes();
        // The shortest two's complement that keeps the sign.
        let mut length = bytes.len();
        let fill = if value < 0 { 0xff } else { 0 };
        while length > 1 && bytes[length - 1] == fill && (bytes[length - 2] >= 0x80) == (value < 0)
        {
            length -= 1;
        }
        out.extend_from_slice(&[0x8a, length as u8]);
        out.extend_from_slice(&bytes[..length]);
    }
}

/// Writes an unsigned integer.
pub(crate) fn unsigned(out: &mut Vec<u8>, value: u64) {
    match i64::try_from(value) {
        Ok(value) => int(out, value),
        Err(_) => {
            out.extend_from_slice(&[0x8a, 9]);
            out.extend_from_slice(&value.to_le_bytes());
            out.push(0);
        }
    }
}

/// Writes an integer of any length, given as its little-endian two's-complement bytes.
pub(crate) fn big_int(out: &mut Vec<u8>, bytes: &[u8]) {
    match u8::try_from(bytes.len()) {
        Ok(length) => out.extend_from_slice(&[0x8a, length]),
        Err(_) => {
            out.push(0x8b);
            out.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
        }
    }
    out.extend_from_slice(bytes);
}

/// Writes a float.
pub(crate) fn float(out: &mut Vec<u8>, value: f64) {
    out.push(b'G');
    out.extend_from_slice(&value.to_be_bytes());
}

/// Writes text, in a form that every protocol from 2 knows. (`BINUNICODE`; text of 4 GiB does not
/// occur.)
pub(crate) fn text(out: &mut Vec<u8>, value: &str) {
    out.push(b'X');
    out.extend_from_slice(&(value.len() as u32).to_le_bytes());
    out.extend_from_slice(value.as_bytes());
}

/// Writes bytes. Protocol 2 has no opcode for them: as Python does, it is a call of
/// `_codecs.encode` on a text that has one character for each byte.
pub(crate) fn bytes(out: &mut Vec<u8>, value: &[u8]) {
    global(out, "_codecs", "encode");
    let characters: String = value.iter().map(|&byte| char::from(byte)).collect();
    text(out, &characters);
    text(out, "latin1");
    close_tuple(out, 2);
    out.push(REDUCE);
}

/// Writes text in the form of protocol 4, which is shorter for short text.
pub(crate) fn text4(out: &mut Vec<u8>, value: &str) {
    match u8::try_from(value.len()) {
        Ok(length) => {
            out.extend_from_slice(&[0x8c, length]);
            out.extend_from_slice(value.as_bytes());
        }
        Err(_) => text(out, value),
    }
}

/// Writes a global in the textual form that every protocol knows.
pub(crate) fn global(out: &mut Vec<u8>, module: &str, name: &str) {
    out.push(b'c');
    out.extend_from_slice(module.as_bytes());
    out.push(b'\n');
    out.extend_from_slice(name.as_bytes());
    out.push(b'\n');
}

/// Closes a tuple of `count` items that were just written; [`open_tuple`] must have been called
/// before them.
pub fn close_tuple(out: &mut Vec<u8>, count: usize) {
    match count {
        0 => out.push(EMPTY_TUPLE),
        1..=3 => out.push(0x84 + count as u8),
        _ => out.push(TUPLE),
    }
}

/// Opens a tuple that will have `count` items.
pub fn open_tuple(out: &mut Vec<u8>, count: usize) {
    if count > 3 {
        out.push(MARK);
    }
}

/// Writes a tuple of sizes.
pub(crate) fn sizes(out: &mut Vec<u8>, sizes: &[usize]) {
    open_tuple(out, sizes.len());
    for &size in sizes {
        unsigned(out, size as u64);
    }
    close_tuple(out, sizes.len());
}
