//! Helpers that whole-system tests share.
