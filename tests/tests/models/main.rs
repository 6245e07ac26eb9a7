//! Models of candle-transformers, unmodified: sharded over two ranks as one unit, they compute and
//! train as in plain candle.
//!
//! The table of all of them is in the book (`docs/src/models.md`). With `FSDP_BLESS=1` the test
//! writes it.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod check;
mod decoders;
mod encoders;

use std::path::Path;

use self::check::{Case, Row, check};

#[test]
fn models_of_candle_transformers_compute_and_train_as_in_plain_candle() {
    let cases: Vec<Case> = [decoders::cases(), encoders::cases()].concat();
    assert!(cases.len() >= 20, "{} models", cases.len());
    let (rows, wrong): (Vec<_>, Vec<_>) = cases.iter().map(check).partition(Result::is_ok);
    let wrong: Vec<String> = wrong.into_iter().filter_map(Result::err).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let rows: Vec<Row> = rows.into_iter().filter_map(Result::ok).collect();
    let table = table(&rows);
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/src/models.md");
    let text = std::fs::read_to_string(&page).unwrap();
    let begin = "<!-- models: begin -->\n";
    let end = "<!-- models: end -->";
    let (head, rest) = text.split_once(begin).unwrap();
    let (found, tail) = rest.split_once(end).unwrap();
    if std::env::var_os("FSDP_BLESS").is_some() {
        write(&page, &format!("{head}{begin}{table}{end}{tail}"));
        return;
    }
    assert!(
        found == table,
        "the table in {page:?} is not that of these models: run this test with FSDP_BLESS=1\n{table}"
    );
}

#[expect(
    clippy::disallowed_methods,
    reason = "a page of the book is no checkpoint"
)]
fn write(page: &Path, text: &str) {
    std::fs::write(page, text).unwrap();
}

fn table(rows: &[Row]) -> String {
    let mut table = "| model | parameters | trained |\n|---|---|---|\n".to_owned();
    for row in rows {
        let Row {
            name,
            parameters,
            trained,
        } = row;
        let trained = trained.map_or("no backward".to_owned(), |trained| trained.to_string());
        table += &format!("| {name} | {parameters} | {trained} |\n");
    }
    table
}
