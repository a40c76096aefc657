//! The command as a process, and the files that it is given.

use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use serde_json::Value;

pub(crate) const HEADER: &str = "Thread,Time,Action,Pointer,Size,Stream\n";

/// A file that goes with the test.
pub(crate) struct File(PathBuf);

impl File {
    pub(crate) fn new(bytes: &[u8]) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("vpmm-cli-{}-{number}.csv", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::write(&path, bytes).unwrap();
        Self(path)
    }

    pub(crate) fn rows(rows: &str) -> Self {
        Self::new(format!("{HEADER}{rows}").as_bytes())
    }

    pub(crate) fn path(&self) -> &str {
        self.0.to_str().unwrap()
    }
}

impl Drop for File {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

pub(crate) fn vpmm(args: &[&str]) -> Command {
    // Where the tests were carried to another machine, the variable says where the command is.
    let built_here = || env!("CARGO_BIN_EXE_vpmm").into();
    let program = std::env::var_os("CARGO_BIN_EXE_vpmm").unwrap_or_else(built_here);
    let mut command = Command::new(program);
    for name in ["VPMM_PAGE_SIZE", "VPMM_PAGES", "VPMM_VA_SIZE"] {
        command.env_remove(name);
    }
    command.args(args).stdin(Stdio::null());
    command
}

pub(crate) fn run(args: &[&str]) -> Output {
    vpmm(args).output().unwrap()
}

pub(crate) fn stdout(output: &Output) -> &str {
    str::from_utf8(&output.stdout).unwrap()
}

pub(crate) fn stderr(output: &Output) -> &str {
    str::from_utf8(&output.stderr).unwrap()
}

/// The objects printed by a run that must end with `code`.
pub(crate) fn json(output: &Output, code: i32) -> Vec<Value> {
    assert_eq!(output.status.code(), Some(code), "{}", stderr(output));
    stdout(output).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The keys of the objects in the order in which they are printed, one list per line.
pub(crate) fn keys(output: &Output) -> Vec<Vec<String>> {
    let of_line = |line: &str| {
        // No value of these objects holds a quotation mark followed by a colon.
        let parts: Vec<&str> = line.split("\":").collect();
        let keys = parts[..parts.len() - 1].iter().map(|part| part.rsplit('"').next().unwrap());
        keys.map(str::to_owned).collect()
    };
    stdout(output).lines().map(of_line).collect()
}
