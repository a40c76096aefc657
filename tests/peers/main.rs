//! The peers' programs replay what `vpmm replay` replays: they read traces by themselves. And what
//! is printed and drawn of the results.

mod results;

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use vpmm_cli::trace::{Action, Trace};

const HEADER: &str = "Thread,Time,Action,Pointer,Size,Stream\n";

/// Ways to write a field that is right, and some that are wrong.
const ACTIONS: &[&str] = &["allocate", "allocate", "free", "free", " free ", "allocate failure"];
const WRONG_ACTIONS: &[&str] = &["Allocate", "oom", "", "\"free"];
const POINTERS: &[&str] = &["0x10", "0x20", "0X20", "\"0x30\"", "0x030", "(nil)", "0"];
const WRONG_POINTERS: &[&str] = &["10", "0x", "0xfffffffffffffffff", "nil", "-0x10", ""];
const SIZES: &[&str] = &["1000", "0", "64", "0x40", "18446744073709551615", " 5", "\"7\""];
const WRONG_SIZES: &[&str] = &["", "-5", "+5", "5.0", "18446744073709551616", "1e3", "0x"];
const STREAMS: &[&str] =
    &["0", "0x0", "(nil)", "0x1", "1", "2", "0x2", "0x02", "0xa", "0x0A", "10"];
const WRONG_STREAMS: &[&str] = &["default", "-1", "", "99999999999999999999"];
const THREADS: &[&str] = &["1", "2", "0x2"];
const WRONG_THREADS: &[&str] = &["", "main", "-1"];
const ENDS: &[&str] = &["\n", "\n", "\n", "\r\n", "\n\n", ",x\n", ",\"a,\"\"b\"\n", " \n"];

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % bound as u64) as usize
    }

    fn of<'a>(&mut self, texts: &[&'a str]) -> &'a str {
        texts[self.below(texts.len())]
    }

    /// A field that is wrong once in a while.
    fn field<'a>(&mut self, right: &[&'a str], wrong: &[&'a str]) -> &'a str {
        if self.below(150) == 0 { self.of(wrong) } else { self.of(right) }
    }

    fn text(&mut self) -> String {
        let mut text = String::new();
        // The places of thread, time, action, pointer, size and stream.
        let mut order = [0, 1, 2, 3, 4, 5];
        match self.below(4) {
            0 => {}
            1 => text += "\u{feff}",
            2 => text += HEADER,
            _ => {
                order.swap(self.below(6), self.below(6));
                let names = ["thread", "TIME", "Action", "\"Pointer\"", " size", "Stream"];
                let named: Vec<&str> = order.map(|place| names[place]).to_vec();
                text += &format!("{},other\n", named.join(","));
            }
        }
        for _ in 0..self.below(14) {
            let fields = [
                self.field(THREADS, WRONG_THREADS),
                "00:00:00",
                self.field(ACTIONS, WRONG_ACTIONS),
                self.field(POINTERS, WRONG_POINTERS),
                self.field(SIZES, WRONG_SIZES),
                self.field(STREAMS, WRONG_STREAMS),
            ];
            let row: Vec<&str> = order.map(|place| fields[place]).to_vec();
            text += &row.join(",");
            text += self.of(ENDS);
        }
        if self.below(20) == 0 {
            text += "\0\0\0";
        }
        text
    }
}

/// Every rule of docs/cli.md by itself.
fn odd() -> Vec<String> {
    let of = |rows: &str| format!("{HEADER}{rows}");
    vec![
        String::new(),
        "\n\n".to_owned(),
        HEADER.to_owned(),
        "hello\n".to_owned(),
        "{\"segments\": []}\n".to_owned(),
        "Thread,Time,Action,Size\n1,x,allocate,5\n".to_owned(),
        "Action,Pointer,Size,Size\nallocate,0x1,5,6\n".to_owned(),
        // The free that is missing is on the stream of its allocation.
        of("1,x,allocate,0x1,64,5\n2,x,allocate,0x1,32,6\n"),
        of("1,x,allocate,0x1,64,5\n2,x,allocate,0x1,0,6\n2,x,free,0x1,0,6\n"),
        // The per-thread stream is one for each thread.
        of("1,x,allocate,0x1,64,0x2\n2,x,allocate,0x2,64,0x2\n2,x,free,0x1,64,0x2\n"),
        of("1,x,allocate,(nil),64,0\n"),
        of("1,x,allocate,0x1,64,0\0\0"),
        of("1,x,allocate,0x1,64,0\0\n1,x,free,0x1,64,0\n"),
        of("1,x,allocate,0x1,64,0\r1,x,free,0x1,64,0\n"),
        of("1,x,allocate,0x1,18446744073709551615,0\n1,x,allocate,0x2,18446744073709551615,0\n"),
    ]
}

/// What `vpmm` would replay, as dump.cpp prints it.
fn ours(text: &str) -> String {
    let Ok(trace) = Trace::read("t", text.as_bytes()) else { return "refused".to_owned() };
    let mut line = format!("peak {}", trace.peak_live_bytes);
    for operation in &trace.operations {
        let sign = match operation.action {
            Action::Allocate => '+',
            Action::Free => '-',
        };
        let (slot, stream) = (operation.slot, operation.stream);
        let bytes = trace.allocations[slot as usize].bytes;
        line += &format!(" {sign}{slot}:{bytes}@{stream}");
    }
    line
}

/// A folder of the test's own, gone at its end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let folder = env::temp_dir().join(format!("vpmm-peers-{}-{name}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        Self(folder)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn peers_read_traces_as_we_do() {
    let folder = Folder::new("traces");
    let program = folder.0.join("dump");
    let compiler = env::var_os("CXX").unwrap_or_else(|| "g++".into());
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/peers/dump.cpp");
    let built = Command::new(compiler)
        .args(["-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror"])
        .arg(source)
        .arg("-o")
        .arg(&program)
        .status()
        .expect("a compiler for C++20");
    assert!(built.success());

    let mut random = Random(7);
    let mut texts = odd();
    texts.extend((0..3000).map(|_| random.text()));
    let paths: Vec<PathBuf> =
        (0..texts.len()).map(|at| folder.0.join(format!("{at}.csv"))).collect();
    for (path, text) in paths.iter().zip(&texts) {
        fs::write(path, text).unwrap();
    }
    let output = Command::new(&program).args(&paths).output().unwrap();
    assert!(output.status.success(), "{}", output.status);
    let theirs = String::from_utf8(output.stdout).unwrap();
    assert_eq!(theirs.lines().count(), texts.len());
    let mut refused = 0;
    for (theirs, text) in theirs.lines().zip(&texts) {
        let ours = ours(text);
        refused += usize::from(ours == "refused");
        assert_eq!(theirs, ours, "{text:?}");
    }
    // Neither all nor nothing.
    assert!(refused > 100 && refused < texts.len() - 100, "{refused} of {}", texts.len());
}
