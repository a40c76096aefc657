//! One line into fields, by the rules of CSV.
//!
//! The rows are split line by line, so that a message can always name the line;
//! a quoted field may hold commas and quotes, but no line end.

use csv_core::{ReadRecordResult, Reader};

/// The fields of one row; the buffers are reused from row to row.
pub(super) struct Fields {
    reader: Reader,
    text: Vec<u8>,
    ends: Vec<usize>,
    count: usize,
}

impl Default for Fields {
    fn default() -> Self {
        Self { reader: Reader::new(), text: Vec::new(), ends: vec![0; 16], count: 0 }
    }
}

impl Fields {
    /// Splits `line`, which holds no line end.
    pub(super) fn split(&mut self, line: &[u8]) {
        self.reader.reset();
        // Unquoting only ever shortens the text.
        self.text.resize(line.len().max(1), 0);
        let (mut read, mut written, mut count) = (0, 0, 0);
        loop {
            // An empty input says that the line is over.
            let (result, r, w, e) = self.reader.read_record(
                &line[read..],
                &mut self.text[written..],
                &mut self.ends[count..],
            );
            read += r;
            written += w;
            count += e;
            match result {
                ReadRecordResult::InputEmpty if read < line.len() => {}
                ReadRecordResult::InputEmpty => {
                    // The next turn passes the empty input that ends the record.
                }
                ReadRecordResult::OutputFull => self.text.resize(self.text.len() * 2, 0),
                ReadRecordResult::OutputEndsFull => self.ends.resize(self.ends.len() * 2, 0),
                ReadRecordResult::Record | ReadRecordResult::End => break,
            }
        }
        self.count = count;
    }

    /// How many fields the row has.
    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// The field at `index`, from 0, without the blanks around it.
    pub(super) fn get(&self, index: usize) -> Option<&[u8]> {
        let end = *self.ends[..self.count].get(index)?;
        let start = match index {
            0 => 0,
            _ => self.ends[index - 1],
        };
        Some(self.text[start..end].trim_ascii())
    }

    /// No field, or one empty one: an empty line.
    pub(super) fn is_blank(&self) -> bool {
        self.count == 0 || (self.count == 1 && self.get(0).is_some_and(<[u8]>::is_empty))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(line: &str) -> Vec<String> {
        let mut fields = Fields::default();
        fields.split(line.as_bytes());
        (0..fields.count())
            .map(|i| String::from_utf8(fields.get(i).unwrap().to_vec()).unwrap())
            .collect()
    }

    #[test]
    fn fields_follow_csv() {
        assert_eq!(split("a,b,c"), ["a", "b", "c"]);
        assert_eq!(split(" a , b,"), ["a", "b", ""]);
        assert_eq!(split("\"a,1\",\"say \"\"b\"\"\""), ["a,1", "say \"b\""]);
        assert_eq!(split("a,\"never closed"), ["a", "never closed"]);
    }

    #[test]
    fn many_fields_fit() {
        let line = vec!["x"; 100].join(",");
        assert_eq!(split(&line).len(), 100);
    }

    #[test]
    fn blank_lines_are_blank() {
        for line in ["", "  ", "\"\""] {
            let mut fields = Fields::default();
            fields.split(line.as_bytes());
            assert!(fields.is_blank(), "{line:?}");
        }
    }

    #[test]
    fn buffers_do_not_leak_into_the_next_row() {
        let mut fields = Fields::default();
        fields.split(b"one,two,three");
        fields.split(b"x,y");
        assert_eq!(fields.count(), 2);
        assert_eq!(fields.get(1), Some(b"y".as_slice()));
        assert_eq!(fields.get(2), None);
    }
}
