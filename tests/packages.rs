//! What the manifests promise: the oldest Rust that they name builds all that is locked (Clippy looks after the
//! workspace's own code), and the packages that are published are complete.

use std::env::{consts, var_os};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

/// Of a version as manifests have it: 1.88 or 1.88.0.
fn parse(version: &str) -> Option<(u32, u32)> {
    let mut parts = version.split('.').map(|part| part.parse().ok());
    Some((parts.next()??, parts.next()??))
}

/// The packages that cargo builds here, with the workspace's own; `None` where cargo does not run this.
fn packages() -> Option<Vec<Value>> {
    let Some(cargo) = var_os("CARGO") else {
        println!("skipped: not run by cargo");
        return None;
    };
    let platform = format!("{}-unknown-linux-gnu", consts::ARCH);
    let output = Command::new(cargo)
        .args(["metadata", "--locked", "--offline", "--format-version", "1"])
        .args(["--filter-platform", &platform])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    match metadata["packages"].take() {
        Value::Array(packages) => Some(packages),
        other => panic!("{other}"),
    }
}

#[test]
fn no_dependency_needs_a_newer_one() {
    let Some(packages) = packages() else { return };
    let of = |package: &Value| package["rust_version"].as_str().and_then(parse);
    let is_ours = |package: &&Value| package["name"] == "vpmm";
    let oldest = packages.iter().find(is_ours).and_then(of).expect("a version of our own");
    let newer: Vec<String> = packages
        .iter()
        .filter(|package| of(package) > Some(oldest))
        .map(|package| {
            format!("{} {} {}", package["name"], package["version"], package["rust_version"])
        })
        .collect();
    assert!(newer.is_empty(), "need more than Rust {oldest:?}: {newer:?}");
    assert!(packages.len() > 50, "only {} packages", packages.len());
}

/// MIT asks for its text in every copy, and a package that depends on a path alone cannot be published.
#[test]
fn what_is_published_has_the_licences_and_says_what_it_is() {
    let Some(packages) = packages() else { return };
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut published = 0;
    // What is published nowhere has an empty list, what may go anywhere none.
    for package in packages.iter().filter(|package| package["source"].is_null()) {
        if package["publish"].is_array() {
            continue;
        }
        published += 1;
        let name = &package["name"];
        for key in ["description", "license", "repository", "rust_version"] {
            assert!(package[key].is_string(), "{name} has no {key}");
        }
        for key in ["keywords", "categories"] {
            assert!(!package[key].as_array().unwrap().is_empty(), "{name} has no {key}");
        }
        let folder = Path::new(package["manifest_path"].as_str().unwrap()).parent().unwrap();
        // Its own, which says what it is: the workspace's is about all of them.
        assert_eq!(package["readme"], "README.md", "{name}");
        let readme = fs::read_to_string(folder.join("README.md"));
        let readme = readme.unwrap_or_else(|error| panic!("{name}, README.md: {error}"));
        let title = format!("# {}\n", name.as_str().unwrap());
        assert!(readme.starts_with(&title), "{name}: {}", readme.lines().next().unwrap_or(""));
        for licence in ["LICENSE-MIT", "LICENSE-APACHE"] {
            let its = fs::read(folder.join(licence));
            let its = its.unwrap_or_else(|error| panic!("{name}, {licence}: {error}"));
            assert!(its == fs::read(root.join(licence)).unwrap(), "{name}: another {licence}");
        }
        for dependency in package["dependencies"].as_array().unwrap() {
            // Cargo leaves out those for tests that have none.
            let needs = dependency["path"].is_string() && dependency["kind"] != "dev";
            assert!(!needs || dependency["req"] != "*", "{name}: {}", dependency["name"]);
        }
    }
    assert!(published > 5, "only {published} packages");
}

/// All sources below a folder.
fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// What lies beside a package's folder does not go along when it is published.
#[test]
fn what_is_published_names_no_file_outside_of_its_package() {
    let Some(packages) = packages() else { return };
    let mut named = 0;
    for package in packages.iter().filter(|package| package["source"].is_null()) {
        if package["publish"].is_array() {
            continue;
        }
        let folder = Path::new(package["manifest_path"].as_str().unwrap()).parent().unwrap();
        let mut found = Vec::new();
        sources(folder, &mut found);
        for source in found {
            let text = fs::read_to_string(&source).unwrap();
            for literal in text.split("\"../").skip(1) {
                named += 1;
                let path = format!("../{}", literal.split('"').next().unwrap());
                let file = source.parent().unwrap().join(&path).canonicalize();
                let is_inside = file.is_ok_and(|file| file.starts_with(folder));
                assert!(is_inside, "{}: {path}", source.display());
            }
        }
    }
    assert!(named > 0, "no file is named at all");
}
