//! Where the runtime library may be: names for the dynamic linker, toolkit
//! folders and the folders that pip wheels unpack into.
//!
//! Wheels put `libcudart` where the dynamic linker does not look. Python is not
//! run to find them: its folder layout is fixed enough to be read from the
//! environment and from where `python3` stands on `PATH`.

use std::cmp::Reverse;
use std::env;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};

/// Names of the runtime that the dynamic linker may know, the bindings' own major
/// first. The others are looked at only to say that they are of another major.
const NATIVE: &str = "libcudart.so.13";
const OTHERS: [&str; 4] =
    ["libcudart.so", "libcudart.so.12", "libcudart.so.11.0", "libcudart.so.14"];

/// Wheel folders below `site-packages`, with the runtime's name there.
const NATIVE_WHEEL: &str = "nvidia/cu13/lib/libcudart.so.13";
const OTHER_WHEELS: [&str; 2] =
    ["nvidia/cuda_runtime/lib/libcudart.so.12", "nvidia/cuda_runtime/lib/libcudart.so.11.0"];

/// Environment variables that name a toolkit; and a conda environment, which is laid out as one where its package
/// cuda-cudart is installed.
const TOOLKIT_VARS: [&str; 4] = ["CUDA_HOME", "CUDA_PATH", "CUDA_ROOT", "CONDA_PREFIX"];
const TOOLKITS: [&str; 2] = ["/usr/local/cuda", "/opt/cuda"];
const TOOLKIT_LIBS: [&str; 2] = ["lib64", "lib"];

/// What to hand to the dynamic linker, in order. Names come as they are; paths
/// only where a file exists, so that an error stays readable.
pub(super) fn runtime_candidates() -> Vec<OsString> {
    candidates(&Places::of_this_process())
}

/// What the search reads of the outside world, so that tests can give another one.
struct Places {
    /// Toolkits named by the environment, then the usual ones.
    toolkits: Vec<PathBuf>,
    /// `site-packages` folders, the active environment's first.
    site_packages: Vec<PathBuf>,
}

impl Places {
    fn of_this_process() -> Self {
        let var = |name: &str| env::var_os(name);
        Self { toolkits: toolkits(&var), site_packages: site_packages(&var, Path::new("/")) }
    }
}

/// The toolkits that the environment names, then the usual ones.
fn toolkits(var: &dyn Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    let named = TOOLKIT_VARS.iter().filter_map(|name| folder(var, name));
    named.chain(TOOLKITS.map(PathBuf::from)).collect()
}

/// The folder that a variable names. Set to nothing it names none: joined with a library's place it would be the
/// folder that the process happens to be in.
fn folder(var: &dyn Fn(&str) -> Option<OsString>, name: &str) -> Option<PathBuf> {
    var(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

fn candidates(places: &Places) -> Vec<OsString> {
    let mut found = vec![OsString::from(NATIVE)];
    let mut add = |path: PathBuf| {
        let path = path.into_os_string();
        if Path::new(&path).is_file() && !found.contains(&path) {
            found.push(path);
        }
    };
    let in_toolkits = |name: &'static str| {
        let libs = places.toolkits.iter().flat_map(|root| TOOLKIT_LIBS.map(|lib| root.join(lib)));
        libs.map(move |lib| lib.join(name))
    };
    let in_wheels = |name: &'static str| places.site_packages.iter().map(move |dir| dir.join(name));

    in_toolkits(NATIVE).for_each(&mut add);
    in_wheels(NATIVE_WHEEL).for_each(&mut add);
    OTHERS.iter().copied().flat_map(in_toolkits).for_each(&mut add);
    OTHER_WHEELS.iter().copied().flat_map(in_wheels).for_each(&mut add);
    found.extend(OTHERS.map(OsString::from));
    found
}

/// The `site-packages` folders that exist, without duplicates: of the active
/// environment, of `PYTHONPATH`, of the Pythons on `PATH`, of the user, of the system.
fn site_packages(var: &dyn Fn(&str) -> Option<OsString>, root: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut add = |dirs: Vec<PathBuf>| {
        for dir in dirs {
            if dir.is_dir() && !found.contains(&dir) {
                found.push(dir);
            }
        }
    };
    for name in ["VIRTUAL_ENV", "CONDA_PREFIX"] {
        add(folder(var, name).map_or_else(Vec::new, |prefix| of_prefix(&prefix)));
    }
    if let Some(path) = var("PYTHONPATH") {
        add(env::split_paths(&path).filter(|dir| dir.is_absolute()).collect());
    }
    if let Some(path) = var("PATH") {
        for bin in env::split_paths(&path).filter(|dir| dir.is_absolute()) {
            add(of_python_in(&bin));
        }
    }
    let user_base = folder(var, "PYTHONUSERBASE");
    if let Some(base) = user_base.or_else(|| Some(folder(var, "HOME")?.join(".local"))) {
        add(of_prefix(&base));
    }
    add(of_prefix(&root.join("usr/local")));
    add(of_prefix(&root.join("usr")));
    found
}

/// The folders of the Python whose `python3` is in `bin`.
fn of_python_in(bin: &Path) -> Vec<PathBuf> {
    let python = bin.join("python3");
    if !python.is_file() {
        return Vec::new();
    }
    let Some(prefix) = bin.parent() else { return Vec::new() };
    if bin.file_name() == Some(OsStr::new("shims")) {
        // pyenv: the file is a script that picks one of the versions beside it.
        let mut versions = entries(&prefix.join("versions"));
        versions.sort_by_key(|dir| Reverse(number(dir)));
        return versions.iter().flat_map(|version| of_prefix(version)).collect();
    }
    // As named first: in a virtual environment `python3` is a link that leads out of it.
    let mut dirs = of_prefix(prefix);
    if let Ok(target) = fs::canonicalize(&python)
        && let Some(prefix) = target.parent().and_then(Path::parent)
    {
        dirs.extend(of_prefix(prefix));
    }
    dirs
}

/// `<prefix>/lib/python3.N/{site,dist}-packages`, the highest N first. Debian
/// keeps one folder for all: `lib/python3/dist-packages`.
fn of_prefix(prefix: &Path) -> Vec<PathBuf> {
    let is_python = |dir: &PathBuf| {
        dir.file_name().is_some_and(|name| name.to_string_lossy().starts_with("python3"))
    };
    let mut versions: Vec<_> = entries(&prefix.join("lib")).into_iter().filter(is_python).collect();
    versions.sort_by_key(|dir| Reverse(number(dir)));
    let kinds = ["site-packages", "dist-packages"];
    versions.iter().flat_map(|dir| kinds.map(|kind| dir.join(kind))).collect()
}

/// The entries of a folder, none where it cannot be read.
fn entries(dir: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(dir) else { return Vec::new() };
    entries.flatten().map(|entry| entry.path()).collect()
}

/// The numbers in a file name, so that 3.11 sorts after 3.9; the name breaks ties.
fn number(path: &Path) -> (Vec<u64>, OsString) {
    let name = path.file_name().unwrap_or_default();
    let text = name.to_string_lossy();
    let numbers = text.split(|c: char| !c.is_ascii_digit()).filter_map(|part| part.parse().ok());
    (numbers.collect(), name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;
    use std::process;
    use std::sync::atomic::{AtomicU32, Ordering};

    /// A folder tree that is removed at the end of the test.
    struct Tree(PathBuf);

    impl Tree {
        fn new(files: &[&str]) -> Self {
            static NEXT: AtomicU32 = AtomicU32::new(0);
            let unique =
                format!("cuda-sys-{}-{}", process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
            // Resolved, so that paths found through links in it begin the same.
            let temp = fs::canonicalize(env::temp_dir()).expect("there is a temporary folder");
            let tree = Self(temp.join(unique));
            for file in files {
                let path = tree.path(file);
                fs::create_dir_all(path.parent().expect("has a folder")).expect("create folder");
                fs::write(path, "").expect("create file");
            }
            tree
        }

        fn path(&self, relative: &str) -> PathBuf {
            self.0.join(relative)
        }

        fn relative(&self, paths: Vec<PathBuf>) -> Vec<String> {
            let strip = |path: PathBuf| match path.strip_prefix(&self.0) {
                Ok(inside) => inside.display().to_string(),
                Err(_) => path.display().to_string(),
            };
            paths.into_iter().map(strip).collect()
        }
    }

    impl Drop for Tree {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    /// Site-packages found in `tree` under an environment of variables set to paths in it.
    fn found(tree: &Tree, vars: &[(&str, &str)]) -> Vec<String> {
        let var = |name: &str| {
            let set = vars.iter().find(|(set, _)| *set == name)?;
            env::join_paths(set.1.split(':').map(|part| tree.path(part))).ok()
        };
        tree.relative(site_packages(&var, &tree.0))
    }

    #[test]
    fn the_active_environment_comes_first_and_the_newest_python_before_older_ones() {
        let tree = Tree::new(&[
            "venv/lib/python3.9/site-packages/x",
            "venv/lib/python3.11/site-packages/x",
            "usr/lib/python3/dist-packages/x",
            "usr/local/lib/python3.11/dist-packages/x",
            "home/.local/lib/python3.11/site-packages/x",
        ]);
        assert_eq!(
            found(&tree, &[("VIRTUAL_ENV", "venv"), ("HOME", "home")]),
            [
                "venv/lib/python3.11/site-packages",
                "venv/lib/python3.9/site-packages",
                "home/.local/lib/python3.11/site-packages",
                "usr/local/lib/python3.11/dist-packages",
                "usr/lib/python3/dist-packages",
            ]
        );
    }

    #[test]
    fn python_on_path_is_taken_where_it_is_named_and_where_it_leads() {
        let tree = Tree::new(&[
            "real/bin/python3.12",
            "real/lib/python3.12/site-packages/x",
            "env/lib/python3.12/site-packages/x",
        ]);
        fs::create_dir_all(tree.path("env/bin")).expect("create folder");
        symlink(tree.path("real/bin/python3.12"), tree.path("env/bin/python3")).expect("link");
        assert_eq!(
            found(&tree, &[("PATH", "nowhere:env/bin")]),
            ["env/lib/python3.12/site-packages", "real/lib/python3.12/site-packages"]
        );
    }

    #[test]
    fn a_pyenv_shim_stands_for_every_version_beside_it() {
        let tree = Tree::new(&[
            "pyenv/shims/python3",
            "pyenv/versions/3.9.1/lib/python3.9/site-packages/x",
            "pyenv/versions/3.11.7/lib/python3.11/site-packages/x",
        ]);
        assert_eq!(
            found(&tree, &[("PATH", "pyenv/shims")]),
            [
                "pyenv/versions/3.11.7/lib/python3.11/site-packages",
                "pyenv/versions/3.9.1/lib/python3.9/site-packages",
            ]
        );
    }

    #[test]
    fn pythonpath_counts_and_nothing_is_listed_twice() {
        let tree = Tree::new(&["a/lib/python3.11/site-packages/x", "b/x"]);
        let both = [("PYTHONPATH", "b:a/lib/python3.11/site-packages"), ("VIRTUAL_ENV", "a")];
        assert_eq!(found(&tree, &both), ["a/lib/python3.11/site-packages", "b"]);
    }

    #[test]
    fn relative_entries_are_not_searched() {
        let var =
            |name: &str| (name == "PYTHONPATH" || name == "PATH").then(|| OsString::from(".:"));
        assert!(site_packages(&var, Path::new("/nonexistent")).is_empty());
    }

    #[test]
    fn a_conda_environment_is_a_toolkit_behind_those_that_are_named() {
        let var = |name: &str| match name {
            "CUDA_HOME" => Some(OsString::from("/cuda")),
            "CONDA_PREFIX" => Some(OsString::from("/env")),
            _ => None,
        };
        let named = toolkits(&var);
        assert_eq!(named[..2], ["/cuda", "/env"].map(PathBuf::from));
        assert_eq!(named[2..], TOOLKITS.map(PathBuf::from));
    }

    #[test]
    fn a_variable_set_to_nothing_names_no_folder() {
        let var = |name: &str| (name != "PATH").then(OsString::new);
        assert_eq!(toolkits(&var), TOOLKITS.map(PathBuf::from));
        assert_eq!(folder(&var, "HOME"), None);
    }

    #[test]
    fn the_bindings_major_is_tried_everywhere_before_any_other() {
        let tree = Tree::new(&[
            "cuda/lib64/libcudart.so",
            "cuda/lib64/libcudart.so.12",
            "cuda/lib64/libcudart.so.13",
            "site/nvidia/cu13/lib/libcudart.so.13",
            "site/nvidia/cuda_runtime/lib/libcudart.so.12",
        ]);
        let places = Places {
            toolkits: vec![tree.path("cuda"), tree.path("cuda"), tree.path("absent")],
            site_packages: vec![tree.path("site")],
        };
        let order = candidates(&places).into_iter().map(PathBuf::from).collect();
        assert_eq!(
            tree.relative(order),
            [
                "libcudart.so.13",
                "cuda/lib64/libcudart.so.13",
                "site/nvidia/cu13/lib/libcudart.so.13",
                "cuda/lib64/libcudart.so",
                "cuda/lib64/libcudart.so.12",
                "site/nvidia/cuda_runtime/lib/libcudart.so.12",
                "libcudart.so",
                "libcudart.so.12",
                "libcudart.so.11.0",
                "libcudart.so.14",
            ]
        );
    }
}
