//! The oldest Rust that `Cargo.toml` names builds all that is locked. Clippy looks after the workspace's own code.

use std::env::{consts, var_os};
use std::process::Command;

use serde_json::Value;

/// Of a version as manifests have it: 1.88 or 1.88.0.
fn parse(version: &str) -> Option<(u32, u32)> {
    let mut parts = version.split('.').map(|part| part.parse().ok());
    Some((parts.next()??, parts.next()??))
}

#[test]
fn no_dependency_needs_a_newer_one() {
    let Some(cargo) = var_os("CARGO") else {
        println!("skipped: not run by cargo");
        return;
    };
    let platform = format!("{}-unknown-linux-gnu", consts::ARCH);
    let output = Command::new(cargo)
        .args(["metadata", "--locked", "--offline", "--format-version", "1"])
        .args(["--filter-platform", &platform])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    let packages = metadata["packages"].as_array().unwrap();
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
