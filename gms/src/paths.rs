//! Where servers are found.

#![forbid(unsafe_code)]

use std::path::PathBuf;

/// The variable that names the folder of the sockets.
pub const SOCKET_DIR: &str = "GMS_SOCKET_DIR";

/// The socket of the server for a GPU, by its UUID, and a tag: `gms_UUID_TAG.sock` in the folder that
/// `GMS_SOCKET_DIR` names, else in the one for temporary files. The Python service's place, so that
/// its clients find this server and the other way round.
pub fn socket_path(uuid: &str, tag: &str) -> PathBuf {
    let folder = std::env::var_os(SOCKET_DIR).filter(|folder| !folder.is_empty());
    let folder = folder.map_or_else(std::env::temp_dir, PathBuf::from);
    folder.join(format!("gms_{uuid}_{tag}.sock"))
}
