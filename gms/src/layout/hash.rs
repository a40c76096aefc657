//! The hash that says whether two layouts are the same.

use std::collections::HashMap;
use std::fmt::Write;

use sha2::{Digest, Sha256};

use super::Layout;

impl Layout {
    /// SHA-256, in hexadecimal, of sizes and tags in the order of slots, and of the metadata in the
    /// order of its names. Gaps between slots do not count, nor do the allocations' names. O(n) and
    /// every byte of metadata.
    pub fn hash(&self) -> String {
        let mut hasher = Sha256::new();
        let mut text = String::new();
        let mut say = |hasher: &mut Sha256, arguments: std::fmt::Arguments<'_>| {
            text.clear();
            // Writing to a String does not fail.
            let _ = text.write_fmt(arguments);
            hasher.update(text.as_bytes());
        };
        let mut ranks = HashMap::with_capacity(self.by_slot.len());
        for (rank, allocation) in self.by_slot.values().enumerate() {
            let (size, aligned_size) = (allocation.size, allocation.aligned_size);
            say(&mut hasher, format_args!("{rank}:{size}:{aligned_size}:{}", allocation.tag));
            ranks.insert(allocation.slot, rank);
        }
        // The order of UTF-8 bytes is that of code points.
        for (key, entry) in &self.metadata {
            let rank = ranks.get(&entry.slot).copied().unwrap_or_default();
            say(&mut hasher, format_args!("{key}:{rank}:{}:", entry.offset_bytes));
            hasher.update(&entry.value);
        }
        let mut hexadecimal = String::with_capacity(64);
        for byte in hasher.finalize() {
            let _ = write!(hexadecimal, "{byte:02x}");
        }
        hexadecimal
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    /// Hashes that the Python service computed.
    #[test]
    fn hashes_are_the_python_services() {
        let golden: Value =
            serde_json::from_str(include_str!("../../tests/golden/v0.json")).unwrap();
        let cases = golden["layout_hashes"].as_array().unwrap();
        assert_eq!(cases.len(), 5);
        for case in cases {
            let mut layout = Layout::default();
            for allocation in case["allocations"].as_array().unwrap() {
                let text = |key: &str| allocation[key].as_str().unwrap();
                let number = |key: &str| allocation[key].as_u64().unwrap();
                layout.next_slot = number("slot");
                let (size, aligned) = (number("size"), number("aligned"));
                layout.insert(text("id").into(), size, aligned, text("tag").into());
            }
            for (key, entry) in case["metadata"].as_object().unwrap() {
                let hexadecimal = entry[2].as_str().unwrap();
                let value: Vec<u8> = (0..hexadecimal.len() / 2)
                    .map(|i| u8::from_str_radix(&hexadecimal[2 * i..2 * i + 2], 16).unwrap())
                    .collect();
                let (id, offset) = (entry[0].as_str().unwrap(), entry[1].as_i64().unwrap());
                layout.put(key, id, offset, &value).unwrap();
            }
            assert_eq!(layout.hash(), case["sha256"].as_str().unwrap(), "{}", case["name"]);
        }
    }
}
