//! The allocator's modules import one way: each from those above it in the table of `vpmm/src/lib.rs`.
//! They keep no state that is global.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

/// What the table's introduction excepts: devices are made by drivers, and watchers of streams told of marks.
const EXCEPTIONS: [(&str, &str); 2] = [("driver", "device"), ("driver", "ordering")];

fn sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("vpmm/src")
}

/// The table's rooms, by their row.
fn rooms() -> HashMap<String, usize> {
    let text = fs::read_to_string(sources().join("lib.rs")).unwrap();
    let rows = text.lines().filter_map(|line| line.strip_prefix("//! | `"));
    let names = |row: &str| -> Vec<String> {
        let cell = row.split(" |").next().unwrap_or_default();
        cell.split(", ").map(|name| name.trim_matches('`').to_owned()).collect()
    };
    rows.enumerate()
        .flat_map(|(at, row)| names(row).into_iter().map(move |name| (name, at)))
        .collect()
}

/// Every source file with the room that it is in.
fn files(folder: &Path, room: Option<&str>, visit: &mut dyn FnMut(&str, &Path)) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        let room = room.unwrap_or(&name);
        match path.is_dir() {
            true => files(&path, Some(room), visit),
            false => visit(room, &path),
        }
    }
}

/// What the code of a file, without its tests and comments, names of the crate's modules.
fn imports(text: &str) -> Vec<&str> {
    let code = text.split("#[cfg(test)]").next().unwrap_or_default();
    let lines = code.lines().filter(|line| !line.trim_start().starts_with("//"));
    let word = |rest: &'_ str| rest.find(|c: char| !(c.is_alphanumeric() || c == '_'));
    lines
        .flat_map(|line| line.split("crate::").skip(1))
        .map(|rest| word(rest).map_or(rest, |end| &rest[..end]))
        .collect()
}

#[test]
fn every_module_is_in_the_table_and_imports_from_above() {
    let rooms = rooms();
    let mut wrong = Vec::new();
    let mut seen = 0;
    files(&sources(), None, &mut |room, path| {
        if room == "lib" {
            return;
        }
        let Some(row) = rooms.get(room) else {
            wrong.push(format!("{room} is not in the table"));
            return;
        };
        seen += 1;
        for of in imports(&fs::read_to_string(path).unwrap()) {
            let above = rooms.get(of).is_none_or(|other| other <= row);
            if !above && !EXCEPTIONS.contains(&(room, of)) {
                wrong.push(format!("{} imports from {of}", path.display()));
            }
        }
    });
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(rooms.len() > 30 && seen > 150, "{} rooms, {seen} files", rooms.len());
}

/// What a program would share through the library without having handed it over. A thread's own are of types
/// that no two threads may use.
fn global(line: &str) -> bool {
    let of_a_thread = ["Cell<", "RefCell<", "Living "];
    line.starts_with("static ")
        && !of_a_thread.iter().any(|name| line.contains(&format!(": {name}")))
}

/// As README has it: counters that number threads, drivers, pools and resources. Beside them, what is the same
/// whenever it is asked for: bytes that nobody writes, and whether the clock is steady.
#[test]
fn the_only_global_state_is_what_counts() {
    let mut found = Vec::new();
    files(&sources(), None, &mut |_, path| {
        // A model of what is the kernel's, in loom's tests.
        if path.ends_with("lock/model.rs") {
            return;
        }
        let text = fs::read_to_string(path).unwrap();
        let code = text.split("#[cfg(test)]").next().unwrap_or_default();
        let lines = code.lines().map(str::trim_start).map(|line| {
            let line = line.strip_prefix("pub(crate) ").unwrap_or(line);
            line.strip_prefix("pub ").unwrap_or(line)
        });
        let name = |line: &str| line.split([' ', ':']).nth(1).unwrap_or_default().to_owned();
        found.extend(lines.filter(|line| global(line)).map(name));
    });
    found.sort();
    assert_eq!(found, ["DRIVERS", "NEXT", "POOLS", "STEADY", "THREADS", "ZEROES"]);
}

#[test]
fn imports_are_found() {
    let text = "use crate::pool::Pool;\n// crate::heap\nlet x = crate::units::f(crate::region_x);\n#[cfg(test)]\nuse crate::y;";
    assert_eq!(imports(text), ["pool", "units", "region_x"]);
}
