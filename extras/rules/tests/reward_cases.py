r"""Responses, references and what each rule pays for them, worked out by hand from what the rules say.

A `# trap` is where a rule pays, or does not, against what a reader would expect; it is so in verl.
"""

GSM8K = [  # (response, truth, strict, flexible), with 0.1 for another number
    ("#### 72", "72", 1, 1), ("so it is\n#### 72", "72", 1, 1), ("#### 72 apples", "72", 1, 1),
    ("#### 71, no: #### 72", "72", 1, 1), ("#### 72, no: #### 71", "72", 0.1, 0.1), ("#### -5", "-5", 1, 1),
    ("#### 5", "-5", 0.1, 0.1), ("#### 0.5", "0.5", 1, 1), ("#### .5", ".5", 1, 1),
    ("#### .5", "0.5", 0.1, 0.1),  # trap: letter by letter
    ("#### 72.0", "72", 0.1, 0.1),  # trap
    ("#### 72", "72.0", 0.1, 0.1),  # trap
    ("#### 18.", "18", 0.1, 0.1),  # trap: the full stop is of the number
    ("it is 18.", "18", 0, 0.1),  # trap
    ("it is 18 .", "18", 0, 1), ("#### 1,200", "1200", 1, 0.1),  # trap: flexible keeps the comma
    ("#### 1,200", "1,200", 0.1, 1),  # trap: strict does not
    ("#### 1,2,0,0", "1200", 1, 0.1), ("#### $72", "72", 0, 1),  # trap: no dollar before the number
    ("#### 72$", "72", 1, 1), ("####72", "72", 0, 1), ("#### **72**", "72", 0, 1), ("####  72", "72", 0, 1),
    ("### 72", "72", 0, 1), ("##### 72", "72", 1, 1), ("#### seventy-two", "72", 0, 0), ("it is 72", "72", 0, 1),
    ("it is 72%", "72", 0, 1), ("72 or 7", "72", 0, 0.1),
    ("7 or 72", "72", 0, 1),  # trap: hedging pays, if the right one comes last
    ("1/2", "2", 0, 1),  # trap
    ("x=-72", "-72", 0, 1), ("10-3", "-3", 0, 1),  # trap: a minus between numbers is a sign
    ("none", "72", 0, 0), ("", "72", 0, 0), (".", "72", 0, 0.1),
    ("... 72 ...", "72", 0, 0.1),  # trap: only a single full stop is passed over
    ("#### 72" + " " * 293, "72", 1, 1), ("#### 72" + " " * 294, "72", 0, 1),  # trap: 300 characters are looked at
    ("#### 72" + " " * 300, "72", 0, 0),
]  # fmt: skip

BOXED = [  # (in the box, truth, score) of math_reward
    ("5", "5", 1), ("5", "6", 0), ("5 ", "5", 1), ("A", "A", 1), ("a", "A", 0),
    (r"\frac{1}{2}", r"\frac12", 1), (r"\frac12", r"\frac{1}{2}", 1), (r"\dfrac{1}{2}", r"\frac{1}{2}", 1),
    (r"\tfrac{3}{4}", r"\frac34", 1), (r"\tfrac12", r"\frac{1}{2}", 1), (r"\frac1{3}", r"\frac{1}{3}", 1),
    (r"\frac{1}3", r"\frac{1}{3}", 0),  # trap: the second pair of braces is not put back
    (r"-\frac{1}{2}", r"-\frac12", 1), (r"\frac{-1}{2}", r"-\frac{1}{2}", 0),
    (r"\frac{2}{4}", r"\frac{1}{2}", 0), (r"\frac{x}{2}", "x/2", 0), (r"1 \frac{1}{2}", r"1\frac{1}{2}", 1),
    ("1/2", r"\frac{1}{2}", 1), ("-3/4", r"\frac{-3}{4}", 1), ("2/4", r"\frac{2}{4}", 1), ("2/4", "1/2", 0),
    ("01/2", r"\frac{1}{2}", 0), ("a/b", r"\frac{a}{b}", 0), ("1/2/3", "1/2/3", 1), ("10/3", r"\frac{10}{3}", 1),
    ("0.5", r"\frac{1}{2}", 1), (r"\frac{1}{2}", "0.5", 1), (".5", r"\frac{1}{2}", 1), (".5", "0.5", 1),
    ("0.50", "0.5", 0),  # trap
    ("0.25", r"\frac{1}{4}", 0),  # trap: one half alone
    (".1", "0.1", 1), ("{.1}", "{0.1}", 1), ("3.0", "3", 0), ("+3", "3", 0), ("-0", "0", 0),
    (r"\sqrt3", r"\sqrt{3}", 1), (r"2\sqrt3", r"2\sqrt{3}", 1), (r"\frac{\sqrt3}{2}", r"\frac{\sqrt{3}}{2}", 1),
    (r"\sqrt 3", r"\sqrt{3}", 0),  # trap: the space is taken for the argument
    (r"6\sqrt{2}", r"\sqrt{72}", 0), (r"\sqrt[3]{2}", r"\sqrt[3]{2}", 1),
    (r"90^\circ", "90", 1), (r"90^{\circ}", "90", 1), ("90°", "90", 0), (r"50\%", "50", 1), ("50%", "50", 0),
    (r"\$5", "5", 1), ("$5", "5", 0),
    (r"5\text{ cm}", "5", 1), (r"5\text{cm}", "5", 0), (r"5\mbox{ cm}", "5", 0),
    (r"12\text{ inches}", r"12\text{ feet}", 1),  # trap: units do not count
    (r"5\text{ cm}\text{ s}", "5", 0), (r"5\text{ a}\text{ b}", r"5\text{ a}\text{ b}", 1),
    (r"\text{yes}", "yes", 0), (r"\text{(A)}", "A", 0), (r"\text{ yes}", r"\text{ no}", 1),  # trap: both are empty
    ("x=5", "5", 1), ("x = 5", "5", 1), ("xy=5", "5", 1), ("xyz=5", "5", 0), ("f(x)=5", "5", 0), ("x=y=5", "5", 0),
    ("5", "x=5", 1), ("y=5", "x=5", 1), ("1+1=2", "2", 0), ("x=", "", 1),
    ("(1, 2)", "(1,2)", 1), (r"\left(1,2\right)", "(1,2)", 1), ("[0, 1)", "[0,1)", 1), ("[0,1]", "(0,1)", 0),
    ("1,2,3", "1, 2, 3", 1), ("3,2,1", "1,2,3", 0), ("1,000", "1000", 0), ("1{,}000", "1000", 0),
    (r"1\!000", "1000", 1), (r"1,\!000", "1,000", 1), ("1 000", "1000", 1),
    ("x+1", "1+x", 0), ("x + 1", "x+1", 1), (r"x\cdot 2", "2x", 0), (r"\pi", r"\pi", 1), ("3.14", r"\pi", 0),
    (r"x \in (0,1)", "(0,1)", 0), ("x^{2}", "x^2", 0), ("{5}", "5", 0),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", 1),
    ("a\nb", "ab", 1), (r"\sqrt", r"\sqrt", 1), (r"\frac", r"\frac", 1), (r"\frac", "1", 0),
]  # fmt: skip

MATH_RESPONSES = [  # (response, truth, score)
    (r"\boxed{3} and then \boxed{4}", "4", 1), (r"\boxed{3} and then \boxed{4}", "3", 0), ("it is 4", "4", 0),
    ("", "4", 0), (r"\boxed{4", "4", 0), (r"\boxed4", "4", 0), (r"\fbox{4}", "4", 0), (r"\boxed{5}\fbox{6}", "5", 1),
    (r"$\boxed 4$ more", "4", 1), (r"\boxed 4", "4", 1), (r"\boxed 4 and so on", "4", 0),
    (r"\boxed {4}", "4", 0),  # trap: "\boxed " is another form
    (r"\boxed 3$ or \boxed{4}", "4", 0),  # trap: … which counts wherever it stands
    (r"\boxed 3$ or \boxed{4}", "3", 1), (r"\boxed{\boxed{4}}", "4", 1), (r"\boxed{\frac{1}{2}}", "1/2", 1),
    (r"\boxed{\{1, 2\}}", r"\{1,2\}", 1), (r"\boxed{4}" + "x" * 10_000, "4", 1), (r"\boxed{4 or 5}", "4", 0),
    ("4" * 20_000, "4", 0),
]  # fmt: skip

DAPO = [  # (response, truth, score)
    ("Answer: 5", "5", 1), ("answer: 5", "5", 1), ("ANSWER : 5", "5", 1), ("Answer:5", "5", 1), ("Answer:\n5", "5", 1),
    ("The answer is 5", "5", -1), ("5", "5", -1), ("", "5", -1), ("Answer: ", "5", -1), ("Answer 5", "5", -1),
    ("Answer: 5\nAnswer: 6", "6", 1), ("Answer: 5\nAnswer: 6", "5", -1), ("Answer: 5\nCheck it.", "5", 1),
    ("Answer: $5$", "5", 1), ("Answer: the result is $5$", "5", 1), ("Answer: $5$ or $6$", "5", 1),  # trap: the first
    ("Answer: $5.$", "5", 1), ("Answer: 5.", "5", -1),  # trap: a full stop is taken off before a dollar alone
    ("Answer: x = 5", "5", 1), ("Answer: 5", "x=5", 1), ("Answer: x=1, y=2", "2", 1),  # trap: after the last =
    ("Answer: y=2x+1", "2x+1", 1), ("Answer: 2x + 1", "2x+1", 1), ("Answer: 1+2x", "2x+1", -1),
    ("Answer: 5 dollars", "5", 1), (r"Answer: \$5", "5", 1), ("Answer: 5 cm", "5", 1), ("Answer: 5 m", "5", -1),
    ("Answer: 5 square feet", "5", 1), ("Answer: 10 mph", "10", 1), ("Answer: 3 hours", "3", 1),
    ("Answer: 3 hrs", "3", -1), ("Answer: 90 degrees", "90", 1), (r"Answer: 90^\circ", "90", 1),
    (r"Answer: 90^{\circ}", "90", 1), (r"Answer: 5\text{ cm}", "5", 1), (r"Answer: 5\text{m}", "5", 1),
    ("Answer: 5%", "5", -1), (r"Answer: 5\%", r"5\%", 1),
    ("Answer: 1,000", "1000", 1), ("Answer: 1000", "1,000", 1), ("Answer: 1{,}000", "1000", 1),
    ("Answer: 1 000", "1000", 1), ("Answer: 2, 3", "2,3", 1), ("Answer: 3,2", "2,3", -1),
    ("Answer: 2,3", "23", 1),  # trap: commas between digits are dropped
    (r"Answer: \boxed{5}", "5", 1), (r"Answer: \text{5}", "5", 1), (r"Answer: \textbf{5}", "5", 1),
    (r"Answer: \overline{AB}", "AB", 1), (r"Answer: \mbox{5}", "5", 1),
    (r"Answer: \frac12", r"\frac{1}{2}", 1), (r"Answer: \frac{1}{2}", r"\frac12", 1),
    (r"Answer: \dfrac12", r"\frac{1}{2}", -1), (r"Answer: \sqrt2", r"\sqrt{2}", 1),
    ("Answer: 0.5", r"\frac{1}{2}", -1), ("Answer: 1/2", r"\frac{1}{2}", -1), ("Answer: 5.0", "5", -1),
    ("Answer: +5", "5", -1), ("Answer: -5", "-5", 1), ("Answer: A", "A", 1), ("Answer: (A)", "A", -1),
    ("Answer: a", "A", -1), ("Answer: a cat", "cat", 1), ("Answer: an apple", "apple", 1),
    ("Answer: pa x", "px", 1),  # trap: "a " goes wherever it stands
    (r"Answer: 5\text{ and }6", "5, 6", 1), ('Answer: "5"', "5", 1), (r"Answer: 5\;", "5", 1),
    ("Answer: 5 (five)", "5", -1), ("Answer: 5 or 7", "5", -1), ("Answer: **5**", "5", -1),
    ("**Answer:** 5", "5", -1),  # trap: the stars follow the colon
    ("Answer: 5" + " " * 291, "5", 1), ("Answer: 5" + " " * 300, "5", -1),
    ("nothing", "[INVALID]", 1),  # trap
    (r"so \boxed{5}", "5", 1), (r"so \boxed{5.0}", "5", -1), (r"so \boxed{ 5}", "5", -1), (r"so \boxed{5", "5", -1),
    (r"\boxed{\frac12}", r"\frac{1}{2}", -1),  # trap: a box is compared letter by letter
    ("Answer: 6\n\\boxed{5}", "5", -1), ("Answer: 5\n\\boxed{6}", "5", 1),
    (r"\boxed{5}" + "." * 91, "5", 1), (r"\boxed{5}" + "." * 92, "5", -1),  # trap: 100 characters are looked at
]  # fmt: skip

DAPO_STRICT = [  # (response, truth, score, what is read)
    (r"\boxed{5}", "5", 1, "5"), (r"\boxed{5} no \boxed{6}", "5", -1, "6"), (r"\boxed{ 5}", "5", -1, " 5"),
    (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", 1, r"\frac{1}{2}"), ("Answer: 5", "5", -1, None),
    (r"\boxed{5", "5", -1, None), (r"\boxed{5}" + "." * 100, "5", -1, None),
    (r"\boxed{5} Answer: 6", "5", 1, "5"),
]  # fmt: skip

QUESTIONS = [  # (response, targets, exact, contained), with 0.1 for another answer
    ("<answer>Paris</answer>", "Paris", 1, 1), ("<answer> Paris </answer>", "Paris", 1, 1),
    ("<answer>\nParis\n</answer>", "Paris", 1, 1), ("<answer>paris.</answer>", "Paris", 1, 1),
    ("<answer>The Paris</answer>", "Paris", 1, 1),
    ("<answer>Paris, France</answer>", "Paris", 0.1, 1),  # trap of the second: saying more pays
    ("<answer>Par</answer>", "Paris", 0.1, 0.1), ("<answer>Paris</answer>", ["Lyon", "Paris"], 1, 1),
    ("<answer>city of light</answer>", ["Paris", "The City of Light"], 1, 1),
    ("<answer>Lyon</answer>", ["Paris", "Nice"], 0.1, 0.1), ("<answer>Lyon</answer>", [], 0.1, 0.1),
    ("<answer>Lyon</answer><answer>Paris</answer>", "Paris", 1, 1),
    ("<answer>Paris</answer><answer>Lyon</answer>", "Paris", 0.1, 0.1),
    ("<answer>Paris or Lyon</answer>", "Paris", 0.1, 1), ("Paris", "Paris", 0, 0), ("", "Paris", 0, 0),
    ("<answer>Paris", "Paris", 0, 0), ("Paris</answer>", "Paris", 0, 0), ("<Answer>Paris</Answer>", "Paris", 0, 0),
    ("<answer></answer>", "Paris", 0.1, 0.1), ("<answer>Theatre</answer>", "atre", 0.1, 1),
    ("<answer>an hour</answer>", "hour", 1, 1), ("<answer>U.S.A.</answer>", "USA", 1, 1),
    ("<answer>Spider-Man</answer>", "spiderman", 1, 1), ("<answer>Spider Man</answer>", "Spider-Man", 0.1, 0.1),
    ("<answer>New   York</answer>", "new york", 1, 1), ("<answer>São Paulo</answer>", "Sao Paulo", 0.1, 0.1),
    ("<answer>“Paris”</answer>", "Paris", 0.1, 1),  # only ASCII punctuation goes
    ("<answer>42.0</answer>", "420", 1, 1),  # trap
    ("<answer>-5</answer>", "5", 1, 1),  # trap
    ("<answer>nothing</answer>", "the", 0.1, 1),  # trap: an article is contained in everything
    ("<answer>the</answer>", "a", 1, 1),  # trap: two articles are both empty
    ("<answer>a<answer>Paris</answer>", "Paris", 0.1, 1), ("<answer>Paris</answer>" * 10, "Paris", 1, 1),
    ("<answer>Paris</answer>" * 11, "Paris", 0.25, 1), ("<answer>Lyon</answer>" * 11, "Paris", 0.1, 0.1),
    ("<answer>Paris</answer>" + "</answer>" * 10, "Paris", 0.25, 1),
    ("<answer>" * 11 + "Paris</answer>", "answer" * 10 + "Paris", 0.25, 1),
]  # fmt: skip

PRIME_MATH = [  # (response, truth, right); the first seven were observed in verl
    ("The answer is 1/2", r"\frac{1}{2}", True), ("Answer: 0.5", "1/2", True), ("so x = 5", "5", True),
    ("answer: 50%", "0.5", True), ("answer is 3.14159", r"\pi", True), (r"answer is 2\pi", "6.28318", True),
    ("7", "7", True), ("7", "8", False), ("", "7", False), ("I guess 7", "7", False),
    ("so the value is 12", "12", True), ("we get 12", "12", True), ("there are 12", "12", True),
    ("it must be 12", "12", True), ("total = 12", "12", True), ("total: 12", "12", True), ("total:\n12", "12", True),
    ("5 is the answer", "5", True), ("5 is answer", "5", True), ("5 and 6 are the answers", "5 and 6", True),
    ("It is 12. That holds", "12", True), ("The answer is 12. I think it is right", "12", True),
    ("The answer is 5.", "5", True), ("The answer is not known", "5", False),
    ("The answer is 4. No, the answer is 5", "5", True), ("The answer is 5. No, the answer is 4", "5", False),
    (r"\boxed{12} units", "12", True), (r"\fbox{12}", "12", True), (r"\boxed{3} or \boxed{12}", "12", True),
    (r"Answer: \boxed{\frac{1}{2}}", "0.5", True), (r"The answer is $\frac{3}{4}$", r"\frac{3}{4}", True),
    ("answer: x = 3", "3", True), ("answer: 1,000", "1000", True), ("answer: 1000.0", "1000", True),
    ("answer: 2/4", "1/2", False),  # trap: fractions are to be reduced
    ("answer: 4/2", "2", False),  # trap: a reference that is an integer wants one
    ("answer: 50", "0.5", True), ("answer: 5", "500", True),  # trap: a hundred times too much or too little
    ("answer: 5", "50", False), (r"answer: 10\%", "10", True), (r"answer: 10\%", "0.1", True),
    ("answer: 11", "10", False),
    ("answer: 1.00005", "1", True), ("answer: 1.0002", "1", False), ("answer: 1e3", "1000", True),
    ("answer: -5", "5", False), ("answer: -5", "-5", True),
    ("answer: 5 cm", "5", True), ("answer: 5 inches", "5", True), ("answer: 5 feet^2", "5", True),
    ("answer: 5 m^2", "5", False), ("answer: $5", "5", True), (r"answer: 90^\circ", "90", True),
    ("answer: 90 degrees", "90", True),
    ("answer: 3 million", "3 million", True), ("answer: 3 million", "3000000", False),  # trap: 3*10^6 is no integer
    ("answer: 101_2", "101", True), ("answer: 101_{2}", "101", True),
    ("answer: 3.14", r"\pi", True), ("answer: 3.2", r"\pi", False), (r"answer: 2\pi", "6.28", True),
    (r"answer: \pi/2", "1.5708", True), (r"answer: \pi/2", "1.6", False),
    ("answer: (1,2)", "(1, 2)", True), ("answer: (1,2,3)", "(1,2)", False), ("answer: (1,3)", "(1,2)", False),
    ("answer: (1,2)", "[1,2]", False), ("answer: [1,2]", "(1,2)", False), ("answer: 1,2", "[1,2]", True),
    ("answer: (0.5,2)", r"(\frac{1}{2},2)", False), ("answer: (100,2)", "(1,2)", True),  # trap: … and to percent inside
    ("answer: 5 or 6", "5 and 6", True), ("answer: 2,3", "23", True),  # trap: commas are of numbers
    ("answer: YES", "yes", True), ("answer: A", "B", False), (r"answer: \text{east}", "east", True),
    ("answer: north", "south", False),
    (r"answer: \begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", True),
    (r"\boxed{\begin{pmatrix}1.00001\\2\end{pmatrix}}", r"\begin{pmatrix}1\\2\end{pmatrix}", True),
]  # fmt: skip

PRIME_MATH_ALGEBRA = [  # the same, where the package math-verify decides
    (r"\boxed{x+1}", "1+x", True),  # observed in verl
    ("answer: 1 1/2", "3/2", True),
    (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{\sqrt{2}}{2}", True),
    ("answer: sqrt(12)", r"2\sqrt{3}", True),
    (r"\boxed{2x+3}", "2x+4", False),
    (r"\boxed{(x+1, 2)}", "(1+x, 2)", True),
    (r"\boxed{(x-1)(x+1)}", "x^2-1", True),
]

GEOMETRY = [  # (response, truth, score)
    (r"<think>a</think>\boxed{5}", "5", 1), (r"<think>a</think>\boxed{6}", "5", 0.1), (r"\boxed{5}", "5", 0.9),
    (r"\boxed{6}", "5", 0), ("<think>a</think>5", "5", 0), ("", "5", 0),
    ("<think>a\nb</think>\nso\n\\boxed{5}\nthat is it", "5", 1), (r"first <think>a</think>\boxed{5}", "5", 0.9),
    (r"<think>\boxed{5}</think>", "5", 0.9), (r"<think>\boxed{5}</think>\boxed{6}", "5", 0.1),
    (r"<think>a</think>\boxed{6}\boxed{5}", "5", 1), (r"<think></think>\boxed{}", "5", 0.1),
    (r"<think></think>\boxed{0.5}", r"\frac{1}{2}", 1), (r"<think></think>\boxed{30^\circ}", "30", 1),
    (r"\boxed{east}", "west", 0), (r"<think>\boxed{5}", "5", 0.9),
]  # fmt: skip

GEOMETRY_ALGEBRA = [
    (r"<think></think>\boxed{2\sqrt{3}}", r"\sqrt{12}", 1),
    (r"\boxed{\frac{10}{4}}", "2.5", 0.9),
    (r"\boxed{2\sqrt{3}}", r"\sqrt{13}", 0),
]

OUTPUTS = [  # (what a program wrote, what was expected, whether it counts) of prime_code
    ("5", "5", True), ("5\n", "5", True), ("  5  ", "5\n", True), ("6", "5", False), ("", "5", False), ("", "", True),
    ("1\n2", "1\n2\n", True), ("1\n\n2", "1\n2", True), ("1\n2", "2\n1", False),
    ("1 2", "2 1", False), ("1 1 2", "1 2", False), ("1 2", "1\n2", False), ("12", "1 2", False), ("1  2", "1 2", True),
    ("YES\nNO", "YES\nNO\nNO\nYES", False), ("5", "inf", False), ("Case 1: 0.3333333", "Case 1: 0.3333334", True),
    ("123456789012 1.0", "123456789999 1.0", False), ("3.0 0.5", "3 0.5", True), ("2 0.5", "1 0.5", False),
    ("0.5", ".5", True), ("0.500001", "0.5", True), ("0.51", "0.5", False), ("1.0", "1", False),
    ("1", "1.0", True), ("1e0", "1.0", True), ("nan", "0.5", False), ("0.5 x", "0.5", False), ("0.5 0.5", "0.5", False),
    ("YES", "yes", False), ("yes", "yes", True), ("0.30000000000000004", "0.3", True), ("5\nextra", "5", False),
    ("2.0 3", "2 3", False), ("1000000", "1000001", False), ("1000000.0", "1000001.0", True),
]  # fmt: skip

VALUES = [  # (the last line, what was expected, whether it counts) of a function's result
    ("5", 5, True), ("5", "5", True), ("5.0", 5, True), ("6", 5, False), ("[1, 2]", [1, 2], True),
    ("[2, 1]", [1, 2], False),
    ("[1, 2]", "[1, 2]", True), ('"a"', "a", True), ('"a"', '"a"', True), ("true", True, True), ("true", "true", True),
    ("null", None, True), ("3", [3], True), ("[[1]]", [[1]], True), ("debug\n5", 5, True), ("5\ndebug", 5, False),
    ("", 5, False), ('{"a": 1}', {"a": 1}, True),
]  # fmt: skip

BLOCKS = [  # (response, the last python block, the first block)
    ("```python\nx\n```", "\nx\n", "x\n"), ("```python\nx", "\nx", "x"),
    ("```python\nx\n``` and ```python\ny\n```", "\ny\n", "x\n"), ("```\nx\n```", None, "x\n"),
    ("```py\nx\n```", None, "x\n"), ("```x = 1```", None, "x = 1"), ("```x = 1\ny = 2```", None, "x = 1\ny = 2"),
    ("no code", None, None), ("```c\nx\n``` ```python\ny\n```", "\ny\n", "x\n"), ("```Python\nx\n```", None, "x\n"),
    ("", None, None),
]  # fmt: skip

SQUARE = "```python\nprint(int(input()) ** 2)\n```"
METHOD = "```python\nclass Solution:\n    def double(self, x):\n        return [x, x]\n```"
ADD = "```python\ndef add(a, b): return a + b\n```"
IMPORTED = "```python\nclass Solution:\n  def f(self, a: List[int]): return math.gcd(*a)\n```"  # by verl's judge
FUTURE = "```python\nfrom __future__ import annotations\nd = defaultdict(int)\nprint(d[input()])\n```"
DEEP = "```python\ndef f(n): return n and 1 + f(n - 1)\nprint(f(int(input())))\n```"
CODE = [  # (response, test cases, score): programs that are run
    (SQUARE, {"inputs": ["2", "3"], "outputs": ["4", "9"]}, 1),
    (SQUARE, {"inputs": ["2", "3"], "outputs": ["4", "8"]}, 0.5),
    ("print(5)", {"inputs": [""], "outputs": ["5"]}, 1),
    ("I do not know.", {"inputs": [""], "outputs": ["5"]}, 0),
    ("```python\nprint(1\n```", {"inputs": [""], "outputs": ["1"]}, 0),
    ("```python\nraise SystemExit(1)\n```", {"inputs": [""], "outputs": [""]}, 0),
    (METHOD, {"inputs": ["1", '"a"'], "outputs": ["[1, 1]", '["a", "a"]'], "fn_name": "double"}, 1),
    (ADD, {"inputs": ["1\n2", "1\n1"], "outputs": ["3", "3"], "fn_name": "add"}, 0.5),
    ("```python\ndef add(a, b): return (a, b)\n```", {"inputs": ["1\n2"], "outputs": ["[1, 2]"], "fn_name": "add"}, 1),
    (ADD, {"assert_case": ["assert add(1, 2) == 3", "assert add(1, 1) == 3"]}, 0.5),
    (IMPORTED, {"inputs": ["[4, 6]"], "outputs": ["2"], "fn_name": "f"}, 1),
    ("```python\nx = 1\n```", {"inputs": ["4\n6"], "outputs": ["2"], "fn_name": "gcd"}, 0),  # in verl 1: math has one
    (FUTURE, {"inputs": ["a"], "outputs": ["0"]}, 1),  # in verl 0
    (DEEP, {"inputs": ["9999"], "outputs": ["9999"]}, 1),
    ("1. So:\n   ```python\n   if 1:\n     print(2)\n   ```", {"inputs": [""], "outputs": ["2"]}, 1),
    (SQUARE, "no JSON", 0),
    (SQUARE, {"inputs": ["2"]}, 0),
    (SQUARE, {"inputs": [], "outputs": []}, 0),
    (SQUARE, {"inputs": ["2"], "outputs": ["4"], "fn_name": "x; import os"}, 0),
]

ROUTES = [  # (data source, response, truth, score)
    ("openai/gsm8k", "#### 5", "5", 1.0),
    ("lighteval/MATH", r"\boxed{5}", "5", 1.0),
    ("DigitalLearningGmbH/MATH-lighteval", r"\boxed{5}", "6", 0.0),
    ("HuggingFaceH4/MATH-500", r"\boxed{5}", "5", 1.0),
    ("math_dapo", "Answer: 5", "5", {"score": 1.0, "acc": True, "pred": "5"}),
    ("math", "Answer: 6", "5", {"score": -1.0, "acc": False, "pred": "6"}),
    ("math_dapo_reasoning", "6", "5", {"score": -1.0, "acc": False, "pred": "[INVALID]"}),
    ("aime24", "Answer: 5", "5", {"score": 1.0, "acc": True, "pred": "5"}),
    ("aime2025", "Answer: 5", "5", {"score": 1.0, "acc": True, "pred": "5"}),
    *((f"numina_{name}", "the answer is 5", "5", 1.0) for name in ("aops_forum", "synthetic_math", "amc_aime")),
    *((f"numina_{name}", "the answer is 6", "5", 0.0) for name in ("synthetic_amc", "cn_k12", "olympiads")),
    *((name, "```python\n(\n```", {"inputs": [], "outputs": []}, 0.0) for name in ("codecontests", "apps")),
    *((name, "```python\n(\n```", "no JSON", 0.0) for name in ("codeforces", "taco")),
    ("hiyouga/geometry3k", r"<think></think>\boxed{5}", "5", 1.0),
    *((f"searchR1_{name}", "<answer>A</answer>", {"target": ["a"]}, 1.0) for name in ("nq", "triviaqa", "popqa")),
    *((f"searchR1_{name}", "<answer>b</answer>", {"target": "c"}, 0.0) for name in ("hotpotqa", "2wikimultihopqa")),
    *((f"searchR1_{name}", "b", {"target": "b"}, 0.0) for name in ("musique", "bamboogle")),
]
